"""Memory for the flat buffers of one engine on this rank: parameters, master weights, gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from hf_zero.distributed.world_group import raise_on_all_ranks
from hf_zero.offload.placement import Placement
from hf_zero.offload.storage import MASTER, CastStorage, DeviceStorage
from hf_zero.zero.layout.engine_plan import EnginePlan, shard_spec
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.flat_layout import MATRIX_ALIGNMENT
from hf_zero.zero.layout.training_state import gradient_memories


class FlatAllocator:
    """Allocates the memory of ``flats``, the flat buffers of ``plan``, which own it afterwards.
    Each must take its parts once and in this order: neighbors of one dtype are adjacent, whole
    buffers up to their alignment. If files hold some of it, the constructor reserves disk space
    (collective) and raises DiskSpaceError if there is not enough.
    """

    def __init__(
        self,
        plan: EnginePlan,
        flats: Sequence[FlatBuffer],
        placement: Placement,
        device: torch.device,
    ):
        self._placement, self._device, self._upcasts = placement, device, plan.upcasts
        self._plans = dict(zip(flats, plan.flats))
        if placement.files is not None:
            with raise_on_all_ranks("take the room on its disk that offloading needs"):
                placement.files.reserve(plan.file_bytes())
        training = [flat for flat in plan.flats if flat.spec.trainable]
        self._full = _arena(
            [(f.layout.padded, f.dtype) for f in flats if not f.sharded], device, MATRIX_ALIGNMENT
        )
        self._shard_of = placement.shards(
            [shard_spec(f.spec) for f in plan.flats if f.spec.sharded and not f.casts_master],
            {flat.spec.key: flat.shard_tier for flat in plan.flats},
        )
        separate_masters = [f for f in training if f.sub_groups is None and f.spec.needs_master]
        self._masters = _arena(
            [(f.spec.owned_numel, torch.float32) for f in separate_masters], device
        )
        separate_gradients = plan.updates_in_backward
        self._gradients = gradient_memories(
            [
                (
                    f.device_gradient_numel,
                    f.gradient_dtype,
                    f.spec.key if separate_gradients else None,
                )
                for f in training
                if f.sums_whole or f.sub_groups is None
            ],
            device,
            plan.settings.zero.keep_step_buffers,
        )

    def full(self, flat: FlatBuffer) -> torch.Tensor:
        """Return memory for the whole buffer of ``flat``, [padded], uninitialized."""
        if flat.sharded:
            return torch.empty(flat.layout.padded, dtype=flat.dtype, device=self._device)
        return next(self._full)

    def place_shard(self, flat: FlatBuffer) -> None:
        """Set the storage of the parameter shard of ``flat``, if separate from the whole buffer."""
        if self._plans[flat].casts_master:
            flat.keep_shard_in(CastStorage(next(self._masters), flat.dtype))
        elif flat.sharded:
            flat.keep_shard_in(self._shard_of(shard_spec(flat.spec)))

    def place_training_state(self, flat: FlatBuffer, local_shard: torch.Tensor) -> None:
        """Allocate the gradient and the master weights of a trainable ``flat``, the latter with the
        values ``local_shard`` [owned].
        """
        planned = self._plans[flat]
        pieces, dtype = planned.sub_groups, planned.gradient_dtype
        needs_master = flat.spec.needs_master
        memory = next(self._gradients) if planned.sums_whole or pieces is None else None
        host: torch.Tensor | None = None
        if pieces is not None:
            state = self._placement.optimizer_state(shard_spec(flat.spec), pieces)
            flat.optimizer_shard.keep_in(state, separate_master=True)
            flat.optimizer_shard.store_master(local_shard)
            host = self._placement.take_pinned(flat.spec.owned_numel, dtype)
        else:
            if flat.cast_master is not None:
                master = flat.cast_master.copy_(local_shard)
            else:  # an offloaded shard is copied by ``flat.shard``
                master = next(self._masters).copy_(local_shard) if needs_master else flat.shard
            flat.optimizer_shard.keep_in(
                DeviceStorage({MASTER: master}), needs_master or flat.shard_offloaded
            )
        # 16-bit gradients are upcast once something is added
        upcasts = self._upcasts and dtype.itemsize < flat.spec.master_dtype.itemsize
        flat.gradient.set_memory(memory, planned.sums_whole, host, upcasts)


def ways_back(
    flats: Sequence[FlatBuffer],
    device: torch.device,
    keeps_gradients: bool,
    separate_gradients: bool,
) -> dict[str, Callable[[], None]]:
    """Return, by key, functions that move master weights and gradient memory of ``flats`` to
    ``device``; the caller moves the moments first. Master weights are adjacent;
    ``separate_gradients``: each gradient has memory of its own.
    """
    masters = _arena(
        [(flat.spec.owned_numel, flat.spec.master_dtype) for flat in flats if keeps_master(flat)],
        device,
    )
    alone = [flat for flat in flats if flat.gradient.accumulated_grad is None]
    grads = gradient_memories(
        [
            (
                flat.spec.owned_numel,
                flat.spec.master_dtype,
                flat.key if separate_gradients else None,
            )
            for flat in alone
        ],
        device,
        keeps_gradients,
    )
    return {
        flat.key: partial(
            flat.move_states_to_device,
            next(masters) if keeps_master(flat) else None,
            next(grads) if flat.gradient.accumulated_grad is None else None,
        )
        for flat in flats
    }


def keeps_master(flat: FlatBuffer) -> bool:
    """Return whether an update on the device needs master weights of ``flat`` besides its shard."""
    return flat.spec.needs_master or flat.shard_offloaded


def _arena(
    pieces: Sequence[tuple[int, torch.dtype]], device: torch.device, alignment: int = 1
) -> Iterator[torch.Tensor]:
    """Allocate one block per dtype and yield its pieces in order, each at a multiple of
    ``alignment`` bytes from its begin: adjacent ones can be processed as one.
    """
    begins, sizes = [], dict.fromkeys((dtype for _, dtype in pieces), 0)
    for numel, dtype in pieces:
        step = max(alignment // dtype.itemsize, 1)
        begins.append(-(-sizes[dtype] // step) * step)
        sizes[dtype] = begins[-1] + numel
    arenas = {dtype: torch.zeros(n, dtype=dtype, device=device) for dtype, n in sizes.items()}
    for begin, (numel, dtype) in zip(begins, pieces):
        yield arenas[dtype][begin : begin + numel]
