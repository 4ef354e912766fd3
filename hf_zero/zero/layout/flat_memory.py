"""Memory for the flat buffers of one engine on this rank: parameters, master weights, gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import torch

from hf_zero.distributed.world_group import raise_on_all_ranks
from hf_zero.offload.placement import Placement
from hf_zero.offload.storage import MASTER, CastStorage, DeviceStorage
from hf_zero.zero.layout.engine_plan import EnginePlan, shard_spec
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.flat_layout import MATRIX_ALIGNMENT
from hf_zero.zero.layout.gradients import GradientPart, gradient_memories


class FlatAllocator:
    """Allocates the memory of ``flats``, the flat buffers of ``plan``, which own it afterwards.
    Neighbors of one dtype are adjacent, whole buffers up to their alignment: one block, allocated
    when the first of them needs it, and by then a model that moves in has freed a part of its own.
    If files hold some of it, the constructor reserves disk space (collective) and raises
    DiskSpaceError if there is not enough.
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
        training = {flat: p for flat, p in self._plans.items() if p.spec.trainable}
        self._full = _adjacent(
            {flat: (flat.layout.padded, flat.dtype) for flat in flats if not flat.sharded},
            device,
            MATRIX_ALIGNMENT,
        )
        self._shard_of = placement.shards(
            [shard_spec(f.spec) for f in plan.flats if f.spec.sharded and not f.casts_master],
            {flat.spec.key: flat.shard_tier for flat in plan.flats},
        )
        self._masters = _adjacent(
            {
                flat: (p.spec.owned_numel, torch.float32)
                for flat, p in training.items()
                if p.sub_groups is None and p.spec.needs_master
            },
            device,
        )
        self._gradients = gradient_memories(
            {
                flat: GradientPart(
                    p.device_gradient_numel,
                    p.gradient_dtype,
                    p.spec.key if plan.updates_in_backward else None,
                )
                for flat, p in training.items()
                if p.sums_whole or p.sub_groups is None
            },
            device,
            plan.settings.zero.keep_step_buffers,
        )

    def full(self, flat: FlatBuffer) -> torch.Tensor:
        """Return memory for the whole buffer of ``flat``, [padded], to be filled by the caller."""
        if flat.sharded:
            return torch.empty(flat.layout.padded, dtype=flat.dtype, device=self._device)
        return self._full[flat]()

    def place_shard(self, flat: FlatBuffer) -> None:
        """Set the storage of the parameter shard of ``flat``, if separate from the whole buffer."""
        if self._plans[flat].casts_master:
            flat.keep_shard_in(CastStorage(self._masters[flat](), flat.dtype))
        elif flat.sharded:
            flat.keep_shard_in(self._shard_of(shard_spec(flat.spec)))

    def place_training_state(self, flat: FlatBuffer, local_shard: torch.Tensor) -> None:
        """Allocate the gradient and the master weights of a trainable ``flat``, the latter with the
        values ``local_shard`` [owned].
        """
        planned, optimizer_shard = self._plans[flat], flat.optimizer_shard
        dtype, host = planned.gradient_dtype, None
        if planned.sub_groups is not None:
            state = self._placement.optimizer_state(shard_spec(flat.spec), planned.sub_groups)
            optimizer_shard.keep_in(state, separate_master=True)
            optimizer_shard.store_master(local_shard)
            host = self._placement.take_pinned(flat.spec.owned_numel, dtype)
        else:
            master = flat.cast_master
            if master is None and flat in self._masters:
                master = self._masters[flat]()
            # flat.shard has the values already, and copies an offloaded shard
            master = flat.shard if master is None else master.copy_(local_shard)
            optimizer_shard.keep_in(DeviceStorage({MASTER: master}), keeps_master(flat))
        memory = self._gradients[flat]() if flat in self._gradients else None
        # 16-bit gradients are upcast once something is added
        upcasts = self._upcasts and dtype.itemsize < flat.spec.master_dtype.itemsize
        flat.gradient.set_memory(memory, planned.sums_whole, host, upcasts)


def moves_to_device(
    flats: Sequence[FlatBuffer],
    device: torch.device,
    keep_step_buffers: bool,
    updates_in_backward: bool,
) -> dict[str, Callable[[], None]]:
    """Return, by key, functions that move master weights and gradients of offloaded ``flats`` to
    ``device``, into memory that is allocated here; the caller moves the moments first. Memory of
    gradients stays between steps (``keep_step_buffers``), and is freed for each flat buffer alone
    (``updates_in_backward``).
    """
    masters = _adjacent(
        {f: (f.spec.owned_numel, f.spec.master_dtype) for f in flats if keeps_master(f)}, device
    )
    gradients = gradient_memories(
        {
            flat: GradientPart(
                flat.spec.owned_numel,
                flat.spec.master_dtype,
                flat.key if updates_in_backward else None,
            )
            for flat in flats
            if flat.gradient.accumulated_grad is None
        },
        device,
        keep_step_buffers,
    )
    return {
        flat.key: partial(
            flat.move_states_to_device,
            masters[flat]() if flat in masters else None,
            gradients[flat]() if flat in gradients else None,
        )
        for flat in flats
    }


def keeps_master(flat: FlatBuffer) -> bool:
    """Return whether an update on the device needs master weights of ``flat`` besides its shard."""
    return flat.spec.needs_master or flat.shard_offloaded


def _adjacent(
    sizes: Mapping[FlatBuffer, tuple[int, torch.dtype]], device: torch.device, alignment: int = 1
) -> dict[FlatBuffer, Callable[[], torch.Tensor]]:
    """Return functions that return memory of ``sizes`` elements, zeros at first: parts of one block
    per dtype, each at a multiple of ``alignment`` bytes from its begin, so that neighbors can be
    processed as one. A block is allocated at the first call for one of its parts.
    """
    begins, ends = dict[FlatBuffer, int](), dict[torch.dtype, int]()
    for flat, (numel, dtype) in sizes.items():
        step = max(alignment // dtype.itemsize, 1)
        begins[flat] = -(-ends.get(dtype, 0) // step) * step
        ends[dtype] = begins[flat] + numel

    @cache
    def block(dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(ends[dtype], dtype=dtype, device=device)

    def part(flat: FlatBuffer) -> torch.Tensor:
        numel, dtype = sizes[flat]
        return block(dtype)[begins[flat] : begins[flat] + numel]

    return {flat: partial(part, flat) for flat in sizes}
