"""Bytes that an engine takes on one rank, tier by tier: the only model of this, shared by the
estimate and the check before training.

[Note: the model]
The plan of the engine (:mod:`hf_zero.zero.layout.engine_plan`) has the bytes at rest: parameters,
gradients and optimizer state of each flat buffer, padding included, in the tier that keeps it. With
K bytes per parameter for the master weight and moments:

- Optimizer on the device: parameters, gradients and K as in the policy table.
- Updates in the backward: the gradients of a few flat buffers, of one where they are sharded.
- Optimizer on the CPU: K and the gradient of this rank's shard in RAM. At stages 0 and 1 the
  gradient of a whole accumulation window stays on the device as well. The device keeps no master
  weights; in fp32 training those in RAM are a copy of its parameters.
- Optimizer in files: K on disk, the gradients in RAM.
- ``ratio``: with the shards laid end to end, those within the first ``1 - ratio`` stay on the
  device.
- Parameters on the CPU: their shards in RAM, frozen ones too. Parameters in files: the first ones,
  up to ``max_in_cpu`` elements, in RAM, the rest on disk.
- Parameters that stay whole at stage 3 (persistent ones): on the device, with K of this rank's
  shard of them, whatever is offloaded.

This module adds the state of extensions (secondary shards, rounded weights, errors that are fed
back, momenta in one bit) and the buffers of a step: gathered units, gradients between ranks, pieces
between files and their use. Activations are not part of this model.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from hf_zero.checkpoint.host_folders import bases, is_in_memory
from hf_zero.checkpoint.memory.folders import SLOTS
from hf_zero.checkpoint.save_plan import stored_width
from hf_zero.compression.error_feedback import ErrorCodec
from hf_zero.config.low_bits import QuantizeTraining, WeightQuantization
from hf_zero.config.memory import MemorySection
from hf_zero.config.variables import local_world_size
from hf_zero.device import kinds
from hf_zero.offload.nvme import pool_size
from hf_zero.offload.update import STAGED
from hf_zero.ops.sign_blocks import SignBlocks
from hf_zero.optim.bf16_state import WIDENED
from hf_zero.optim.one_bit import OneBit, one_bit_of
from hf_zero.zero.gather.schedule import count_prefetched
from hf_zero.zero.layout.engine_plan import SIXTEEN_BITS, EnginePlan, FlatPlan
from hf_zero.zero.layout.wrap import names_in_blocks
from hf_zero.zero.reduce.reductions import IN_FLIGHT

ROOT = "(root)"
SECONDARY, ROUNDED = "secondary shards in the node", "rounded weights"
ERRORS, STATE, ONE_BIT = "errors of gradients", "master weights and moments", "momenta in 1 bit"
MEMORY = "checkpoints in memory"
WITH_PARAMETERS = (SECONDARY, ROUNDED)
# what bytes at rest are -> the kind of state that they count as
STATE_OF_PART = {
    **dict.fromkeys(("parameters", SECONDARY, ROUNDED), "parameters"),
    **dict.fromkeys(("gradients", ERRORS), "gradients"),
    **dict.fromkeys((STATE, ONE_BIT), "optimizer"),
}


@dataclass(frozen=True)
class NamedBytes:
    """Part of the bytes of a tier, and its name."""

    what: str
    nbytes: int


@dataclass(frozen=True)
class Needs:
    """Bytes of one rank in each tier.

    ``pinned`` is the part of ``ram`` that a GPU copies to or from; ``files``: bytes by folder.
    """

    device: tuple[NamedBytes, ...]
    ram: tuple[NamedBytes, ...]
    disk: tuple[NamedBytes, ...]
    pinned: int
    files: tuple[tuple[str, int], ...]

    @property
    def device_bytes(self) -> int:
        return sum(part.nbytes for part in self.device)

    @property
    def ram_bytes(self) -> int:
        return sum(part.nbytes for part in self.ram)

    @property
    def disk_bytes(self) -> int:
        return sum(part.nbytes for part in self.disk)


def needs(plan: EnginePlan) -> Needs:
    """Return the bytes of one rank, by the model in the note above."""
    settings, parts = plan.settings, state_parts(plan)
    optimizer, param = settings.offload_optimizer, settings.offload_param
    away = [flat for flat in plan.trainable if flat.sub_groups is not None]
    pieces = max((size for flat in away for size in plan.piece_bytes(flat)), default=0)
    pieces *= pool_size(optimizer.buffer_count) if optimizer.device == "nvme" else 0
    in_files = [flat.parameter_bytes()["disk"] for flat in plan.flats]
    units = max(in_files, default=0) * pool_size(param.buffer_count)
    gpu = not kinds.is_synchronous(plan.device)
    staging = 0
    if gpu and away:
        largest = max(flat.spec.owned_numel for flat in away)
        wide = max(flat.spec.dtype.itemsize for flat in plan.trainable)
        staging = STAGED * min(optimizer.buffer_size, largest) * wide
    gradients, parameters = parts["gradients", "ram"], parts["parameters", "ram"]
    by_folder: Counter[str] = Counter()
    for folders, nbytes in plan.file_bytes().items():
        for folder in folders:
            by_folder[folder] += -(-nbytes // len(folders))
    return Needs(
        device=_parts(
            *((what, parts[what, "device"]) for what in ("parameters", *WITH_PARAMETERS)),
            ("gathered units", gathered_bytes(plan)),
            *((what, parts[what, "device"]) for what in ("gradients", ERRORS)),
            ("gradients under way", gradient_buffers(plan)),
            *((what, parts[what, "device"]) for what in (STATE, ONE_BIT)),
            ("state that a step widens to fp32", widened_bytes(plan)),
        ),
        ram=_parts(
            (STATE, parts[STATE, "ram"]),
            ("gradients", gradients),
            ("parameters", parameters),
            ("pieces between files and the update", pieces),
            ("shards between files and the device", units),
            ("parameters on their way to the GPU", staging),
            (MEMORY, memory_checkpoints(plan)),
        ),
        disk=_parts((STATE, parts[STATE, "disk"]), ("parameters", parts["parameters", "disk"])),
        pinned=(gradients + staging if gpu and optimizer.pin_memory is not False else 0)
        + (parameters + units if gpu and param.pin_memory is not False else 0),
        files=tuple(by_folder.items()),
    )


def memory_checkpoints(plan: EnginePlan) -> int:
    """Return the bytes of checkpoints in memory that a host keeps for each of its ranks: two
    generations, with copies on as many hosts as there are to be, without buffers; 0 where they are
    off, or in a folder on a disk.
    """
    settings = plan.settings.section_of(MemorySection)
    if not settings.every or not is_in_memory(bases(settings.folder)[0]):
        return 0
    local_ranks = local_world_size(plan.dims.world)
    hosts = -(-plan.dims.world // local_ranks)
    return len(SLOTS) * min(settings.copies, hosts) * _share_of_files(plan)


def _share_of_files(plan: EnginePlan) -> int:
    """Return the bytes of a checkpoint's rank files divided by the ranks: equal on all."""
    total = 0
    for flat in plan.flats:
        spec = flat.spec
        sharing = len(plan.dims.ranks_sharing(plan.rank, spec.sharding.axes))
        written = spec.owned_numel * spec.layout.num_shards * stored_width(plan, flat)
        total += -(-written // sharing)
    return total


def state_parts(plan: EnginePlan) -> Counter[tuple[str, str]]:
    """Return the bytes at rest, by what they are and tier: those between a backward and its step;
    of gradients that updates in the backward free, the most at a time. Momenta in one bit are
    counted as after the freeze.
    """
    totals: Counter[tuple[str, str]] = Counter()
    sends_momenta = any(flat.spec.momentum_blocks for flat in plan.flats)
    one_bit = one_bit_of(plan.settings, plan.optimizer) if sends_momenta else None
    for flat in plan.flats:
        for what, by_tier in (
            ("parameters", flat.parameter_bytes()),
            ("gradients", {"ram": flat.gradient_bytes()["ram"]}),
            (STATE, plan.optimizer_bytes(flat)),
        ):
            for tier, nbytes in by_tier.items():
                totals[what, tier] += nbytes
        totals[SECONDARY, "device"] += _secondary(flat, plan)
        totals[ROUNDED, "device"] += _rounded(flat, plan)
        codec = flat.spec.reduce_codec
        if isinstance(codec, ErrorCodec):
            layout = flat.spec.layout
            totals[ERRORS, "device"] += codec.error_nbytes(layout.shard_numel, layout.num_shards)
        totals[ONE_BIT, "device"] += _one_bit(flat, one_bit)
    totals["gradients", "device"] += device_gradients(plan)
    return totals


def device_gradients(plan: EnginePlan) -> int:
    """Return the most bytes of gradients on the device at a time: all of them or, if updates in the
    backward free them, those of consecutive flat buffers, whose number is that of messages in
    flight where they are whole.
    """
    sizes = [flat.gradient_bytes()["device"] for flat in plan.trainable]
    settings = plan.settings
    single = (settings.gradient_accumulation_steps or 1) == 1
    if not plan.updates_in_backward or settings.zero.keep_step_buffers or not single:
        return sum(sizes)
    on_wire = not plan.policy.shards_gradients and plan.dims.pp_stage_ranks > 1
    count = IN_FLIGHT + 1 if on_wire else 1
    return max((sum(sizes[at : at + count]) for at in range(len(sizes))), default=0)


def state_bytes(plan: EnginePlan, between_steps: bool = False) -> Counter[tuple[str, str]]:
    """Return the bytes at rest by kind and tier, as a running engine counts its own
    (:mod:`hf_zero.zero.state_bytes`): those between a backward and its step or, with
    ``between_steps``, those from a step until the next backward.
    """
    by_kind: Counter[tuple[str, str]] = Counter()
    for (what, tier), nbytes in state_parts(plan).items():
        by_kind[STATE_OF_PART[what], tier] += nbytes
    if between_steps and not plan.settings.zero.keep_step_buffers:
        by_kind["gradients", "device"] -= device_gradients(plan)
    return by_kind


def _secondary(flat: FlatPlan, plan: EnginePlan) -> int:
    """Return the bytes of this rank's secondary shard, within its node."""
    node = plan.extensions.node
    sharded = flat.spec.sharded and node > 1
    return flat.spec.layout.padded // node * flat.spec.dtype.itemsize if sharded else 0


def _rounded(flat: FlatPlan, plan: EnginePlan) -> int:
    """Return the upper bound on the bytes of the second buffer, of the weights that modules compute
    with, of a flat buffer that is whole between passes.
    """
    in_blocks = plan.settings.section_of(QuantizeTraining).enabled
    if flat.spec.sharded or not flat.spec.trainable:
        return 0
    if not in_blocks and not plan.settings.section_of(WeightQuantization).enabled:
        return 0
    names = names_in_blocks(plan.model) if in_blocks else flat.parameters
    rounded = any(len(slot.shape) > 1 and slot.name in names for slot in flat.spec.layout.slots)
    return flat.spec.layout.padded * flat.spec.dtype.itemsize if rounded else 0


def _one_bit(flat: FlatPlan, one_bit: OneBit | None) -> int:
    """Return the bytes of a 1-bit optimizer after the freeze, which are whole on each rank: errors
    in 32 bits, exponents in 8, the momentum in 1 and, for 16-bit parameters, weights in 32. Local
    steps add, of all flat buffers and as an upper bound, the rank's own momentum, its accumulated
    update, and the weights that modules compute with.
    """
    if one_bit is None or not flat.spec.trainable:
        return 0
    layout, form = flat.spec.layout, flat.spec.momentum_blocks
    local = 0
    weights, computed = (4, 2) if flat.spec.dtype in SIXTEEN_BITS else (0, 4)
    if one_bit.local:
        local = (4 + 4 + computed) * layout.padded
        local += (4 + 4 + 1 + weights) * layout.padded if form is None else 0
    if form is None:
        return local
    blocks = SignBlocks(form.block).cut(
        layout.edges, layout.end, layout.num_shards, layout.shard_numel
    )
    return (4 + 1 + weights) * layout.padded + layout.num_shards * blocks.nbytes + local


def unit_bytes(plan: EnginePlan) -> dict[str, int]:
    """Return the bytes of each gathered unit, in the order of the model."""
    whole: dict[str, int] = {}
    for flat in plan.flats:
        if not flat.spec.persistent:
            name = flat.unit.name or ROOT
            nbytes = flat.spec.layout.padded * flat.spec.dtype.itemsize
            whole[name] = whole.get(name, 0) + nbytes
    return whole


def gathered_bytes(plan: EnginePlan) -> int:
    """Return the peak bytes of gathered units at stage 3: the root, one unit, and the units
    prefetched after it.
    """
    if not plan.policy.shards_parameters:
        return 0
    whole = unit_bytes(plan)
    root, sizes = whole.pop(ROOT, 0), list(whole.values())
    ahead = plan.settings.zero.prefetch_bucket_size
    ahead *= max((flat.spec.dtype.itemsize for flat in plan.flats), default=0)
    most = 0
    for order in (sizes, sizes[::-1]):
        for index, size in enumerate(order):
            following = order[index + 1 :]
            most = max(most, size + sum(following[: count_prefetched(following, ahead)]))
    return root + most


def gradient_buffers(plan: EnginePlan) -> int:
    """Return the bytes of gradients in transit and of the shards that arrive for them, as many of
    each size as the engine keeps for the next unit.

    Whole gradients that are on the device anyway and in the communication dtype (stages 0 and 1)
    are sent without a copy.
    """
    sizes = Counter(
        (flat.spec.layout.padded, flat.spec.layout.num_shards, flat.spec.dtype, flat.gradient_dtype)
        for flat in plan.trainable
    )
    total = 0
    for (padded, shards, dtype, window), count in sizes.items():
        narrower = dtype.itemsize < window.itemsize and plan.dims.pp_stage_ranks > 1
        if (plan.policy.shards_gradients or narrower) and count > 1:
            total += IN_FLIGHT * dtype.itemsize * padded
        if shards > 1:
            total += min(count, shards) * dtype.itemsize * (padded // shards)
    return total


def widened_bytes(plan: EnginePlan) -> int:
    """Return the bytes in fp32 of the largest batch of gradients, master weights and moments that
    a step on the device widens from bf16.
    """
    bf16 = plan.extensions.narrow
    flats = [flat for flat in plan.trainable if flat.sub_groups is None]
    if bf16 is None or not flats:
        return 0
    narrow = [flat for flat in flats if flat.spec.dtype == torch.bfloat16]
    numel = min(WIDENED, sum(flat.spec.owned_numel for flat in narrow))
    gradients = any(flat.gradient_dtype.itemsize < 4 for flat in narrow)
    return 4 * numel * (gradients + bf16.masters + plan.moments * bf16.moments)


def _parts(*parts: tuple[str, int]) -> tuple[NamedBytes, ...]:
    return tuple(NamedBytes(what, nbytes) for what, nbytes in parts if nbytes)
