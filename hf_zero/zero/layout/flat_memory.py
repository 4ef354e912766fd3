"""Memory for the flat buffers of one engine on this rank: parameters, master weights, gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from hf_zero.distributed.world_group import raise_on_all_ranks
from hf_zero.offload.placement import Placement, ShardSpec
from hf_zero.offload.storage import MASTER, DeviceStorage
from hf_zero.optim.segments import sub_groups
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.stage_policy import Policy


@dataclass(frozen=True)
class Dtypes:
    """Dtypes of an engine's values, and the number of moments.

    precision: of parameters; None keeps every dtype. accumulate: of sums of gradients; None: fp32.
    wire: of gradients in messages; None: the parameters'. moments: numbers per element that the
    optimizer keeps. reads_16_bits: the optimizer's update on the device reads 16-bit gradients, so
    whole ones are kept in 16 bits where nothing is added to them. buffers: of the model's
    floating-point buffers; None keeps theirs.
    """

    precision: str | None
    accumulate: torch.dtype | None = None
    wire: torch.dtype | None = None
    moments: int = 0
    reads_16_bits: bool = False
    buffers: torch.dtype | None = None


class FlatMemory:
    """Memory for ``flats``, each of which must take its parts once and in this order: neighbours of
    one dtype are adjacent. If files hold some of it, the constructor reserves disk space
    (collective) and raises DiskSpaceError if there is not enough.
    """

    def __init__(
        self,
        flats: Sequence[FlatBuffer],
        group_of: Mapping[str, int],
        policy: Policy,
        placement: Placement,
        device: torch.device,
        dtypes: Dtypes,
    ):
        self._policy = policy
        self._placement = placement
        self._device = device
        self._dtypes = dtypes
        self._specs = {
            flat: ShardSpec(flat.key, flat.spec.owned_numel, flat.dtype, flat.trainable)
            for flat in flats
        }
        away = placement.offloaded(
            [spec for flat, spec in self._specs.items() if not flat.spec.persistent]
        )
        self._sub_groups = {
            flat: sub_groups(flat.layout, flat.owned, group_of, placement.sub_group_size)
            for flat in flats
            if flat.key in away
        }
        sharded = [self._specs[flat] for flat in flats if flat.sharded]
        if placement.in_files:
            states = [(self._specs[flat], those) for flat, those in self._sub_groups.items()]
            with raise_on_all_ranks("take the room on its disk that offloading needs"):
                placement.reserve(sharded, states, dtypes.moments)
        training = [flat for flat in flats if flat.trainable]
        self._sums = {flat: self._sum_dtype(flat) for flat in training}
        self._full = _arena([(f.layout.padded, f.dtype) for f in flats if not f.sharded], device)
        self._shard_of = placement.shards(sharded)
        own_masters = [f for f in training if f not in self._sub_groups and _needs_master(f)]
        self._masters = _arena([(f.spec.owned_numel, torch.float32) for f in own_masters], device)
        on_device = [flat for flat in training if self._sums_on_device(flat)]
        self._gradients = _arena([(self._sum_numel(f), self._sums[f]) for f in on_device], device)

    def full(self, flat: FlatBuffer) -> torch.Tensor:
        """Return memory for the whole buffer of ``flat``, [padded], uninitialised."""
        if flat.sharded:
            return torch.empty(flat.layout.padded, dtype=flat.dtype, device=self._device)
        return next(self._full)

    def place_shard(self, flat: FlatBuffer) -> None:
        """Set the storage of the parameter shard of ``flat``, if separate from the whole buffer."""
        if flat.sharded:
            flat.keep_shard_in(self._shard_of(self._specs[flat]))

    def place_training_state(self, flat: FlatBuffer, own: torch.Tensor) -> None:
        """Allocate the gradient and the master weights of a trainable ``flat``; ``own`` [owned] are
        the values of the latter.
        """
        offloads = flat in self._sub_groups
        buffer = next(self._gradients) if self._sums_on_device(flat) else None
        shard, whole = (buffer, None) if self._policy.shards_gradients else (None, buffer)
        if offloads:
            state = self._placement.optimizer_state(self._specs[flat], self._sub_groups[flat])
            flat.optimizer_shard.keep_in(state, own_master=True)
            flat.optimizer_shard.store_master(own)
            shard = self._placement.take_pinned(flat.spec.owned_numel, self._sums[flat])
        else:
            needs = _needs_master(flat)
            # an offloaded shard is copied by ``flat.shard``
            master = next(self._masters).copy_(own) if needs else flat.shard
            flat.optimizer_shard.keep_in(DeviceStorage({MASTER: master}), needs or flat.is_away)
        # 16-bit gradients are upcast once something is added
        upcasts = self._dtypes.accumulate is None and self._sums[flat].itemsize == 2
        flat.gradient.allocate(shard, whole, upcasts, offloads)

    def _sum_dtype(self, flat: FlatBuffer) -> torch.dtype:
        dtypes, spec = self._dtypes, self._specs[flat]
        if dtypes.accumulate is not None:
            return dtypes.accumulate
        stays_whole = dtypes.reads_16_bits and not self._policy.shards_gradients
        if flat in self._sub_groups or stays_whole:
            return self._placement.gradient_dtype(spec, dtypes.wire or flat.dtype)
        return spec.wide

    def _sums_on_device(self, flat: FlatBuffer) -> bool:
        return flat not in self._sub_groups or not self._policy.shards_gradients

    def _sum_numel(self, flat: FlatBuffer) -> int:
        return flat.spec.owned_numel if self._policy.shards_gradients else flat.layout.padded


def ways_back(flats: Sequence[FlatBuffer], device: torch.device) -> dict[str, Callable[[], None]]:
    """Return, by key, functions that bring the offloaded states of ``flats`` back to ``device``, in
    adjacent memory.
    """
    masters = _arena(
        [
            (flat.spec.owned_numel, torch.float64 if flat.dtype == torch.float64 else torch.float32)
            for flat in flats
            if keeps_master(flat)
        ],
        device,
    )
    alone = [flat for flat in flats if flat.gradient.accumulated_grad is None]
    grads = _arena(
        [
            (flat.spec.owned_numel, torch.float32 if _needs_master(flat) else flat.dtype)
            for flat in alone
        ],
        device,
    )
    return {
        flat.key: partial(
            flat.move_states_to_device,
            next(masters) if keeps_master(flat) else None,
            next(grads) if flat.gradient.accumulated_grad is None else None,
        )
        for flat in flats
    }


def _needs_master(flat: FlatBuffer) -> bool:
    return flat.dtype in (torch.bfloat16, torch.float16) or flat.spec.sends_differences


def keeps_master(flat: FlatBuffer) -> bool:
    """Whether an update on the device needs master weights of ``flat`` besides its shard."""
    return _needs_master(flat) or flat.is_away


def _arena(
    pieces: Sequence[tuple[int, torch.dtype]], device: torch.device
) -> Iterator[torch.Tensor]:
    """Allocate one block per dtype and yield its pieces in order: adjacent ones can be processed as
    one.
    """
    arenas = {
        dtype: torch.zeros(sum(n for n, d in pieces if d == dtype), dtype=dtype, device=device)
        for dtype in dict.fromkeys(d for _, d in pieces)
    }
    at = dict.fromkeys(arenas, 0)
    for numel, dtype in pieces:
        yield arenas[dtype][at[dtype] : at[dtype] + numel]
        at[dtype] += numel
