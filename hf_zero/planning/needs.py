"""Bytes that the engine takes on one rank, tier by tier: the only model of this, shared by the
estimate and the preflight check.

[Note: the model]
A model is a list of :class:`FlatParameters`, one per flat buffer of the engine, each laid out as
the engine does it (padding included). Per trainable flat buffer, with K bytes per parameter for the
master weight (4) and moments:

- Optimizer on the device: parameters, gradients and K as in the policy table; moments in fp32.
- Optimizer on the CPU: K and the gradient of this rank's chunk in RAM. At stages 0 and 1 the
  gradient of a whole accumulation window stays on the device as well. The device keeps no master
  weights; in fp32 training those in RAM are a copy of its parameters.
- Optimizer in files: K on disk, the gradients in RAM, and in RAM the pieces in transit.
- ``ratio``: with the chunks laid end to end, those within the first ``1 - ratio`` stay on the
  device.
- Parameters on the CPU: their chunks in RAM, frozen ones too. Parameters in files: the first ones,
  up to ``max_in_cpu`` elements, in RAM, the rest on disk, and those in transit in RAM. The device
  holds the gathered units.
- Parameters that stay whole at stage 3 (persistent ones): on the device, with K of this rank's
  chunk of them, whatever is offloaded.

A gradient into which no micro-batches are accumulated is kept in 16 bits; see
:meth:`MemoryPlan.gradient_bytes`. Activations are not part of this model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_zero.offload.nvme import paged, pool_size, size_in_file
from hf_zero.offload.storage import StorageFormat, moment_format
from hf_zero.planning.moments import MASTER_BYTES, moment_bytes
from hf_zero.planning.plan import SIXTEEN_BITS, FlatParameters, MemoryPlan
from hf_zero.zero.gather.schedule import AHEAD
from hf_zero.zero.reduce.reductions import IN_FLIGHT

STAGING = 3  # pieces of parameters in transit to the GPU


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


def needs(groups: Sequence[FlatParameters], plan: MemoryPlan) -> Needs:
    """Return the bytes of one rank, by the model in the note above."""
    flats = [_Laid.of(group, plan) for group in plan.flats_of(groups)]
    trainable = [flat for flat in flats if flat.group.trainable]
    movable = [flat for flat in trainable if not flat.group.whole]
    keep = (1.0 - plan.ratio) * sum(flat.chunk for flat in movable)
    for flat in movable:
        keep -= flat.chunk
        flat.stays = flat.chunk if keep >= 0 else 0
    state, state_on_disk, state_pieces, gradients = _offloaded(trainable, plan)
    parameters, parameters_on_disk, units = _parameters(flats, plan)
    largest = max((flat.leaves for flat in trainable), default=0)
    wide = max((flat.group.dtype.itemsize for flat in trainable), default=0)
    staging = STAGING * min(plan.optimizer.buffer_size, largest) * wide if plan.gpu else 0
    on_device = sum(
        flat.parameter_chunk * flat.group.dtype.itemsize
        for flat in flats
        if flat.group.whole or not plan.param.on
    )
    pins = plan.gpu and plan.optimizer.pin_memory is not False
    return Needs(
        device=_parts(
            ("parameters", on_device),
            (
                "secondary shards in the node",
                sum(plan.secondary_bytes(flat.group, flat.padded) for flat in flats),
            ),
            (
                "rounded weights",
                sum(plan.rounded_bytes(flat.group, flat.padded) for flat in flats),
            ),
            ("gathered units", gathered_bytes(groups, plan)),
            ("gradients", sum(flat.gradient_on_device(plan) for flat in trainable)),
            ("errors of gradients", sum(plan.error_bytes(flat.group) for flat in trainable)),
            ("gradients under way", gradient_buffers(groups, plan)),
            ("master weights and moments", sum(flat.state_on_device(plan) for flat in trainable)),
            ("momenta in 1 bit", sum(flat.one_bit_on_device(plan) for flat in trainable)),
        ),
        ram=_parts(
            ("master weights and moments", state),
            ("gradients", gradients),
            ("parameters", parameters),
            ("pieces between files and the update", state_pieces),
            ("shards between files and the device", units),
            ("parameters on their way to the GPU", staging),
        ),
        disk=_parts(
            ("master weights and moments", state_on_disk), ("parameters", parameters_on_disk)
        ),
        pinned=(gradients + staging if pins else 0)
        + (parameters + units if plan.gpu and plan.param.pin_memory is not False else 0),
        files=_files(
            (plan.optimizer.nvme_path, state_on_disk), (plan.param.nvme_path, parameters_on_disk)
        ),
    )


@dataclass
class _Laid:
    """A group laid out for a plan. Elements of: this rank's ``chunk``, the ``padded`` gathered flat
    buffer, the rank's ``parameter_chunk``, and the part of the chunk that ``stays`` on the device.
    """

    group: FlatParameters
    chunk: int
    padded: int
    parameter_chunk: int
    stays: int = 0

    @classmethod
    def of(cls, group: FlatParameters, plan: MemoryPlan) -> _Laid:
        shards = plan.shards_of(group)
        parameter_shards = plan.policy_of(group).parameter_shards(shards)
        layout = group.layout(shards if group.trainable else parameter_shards)
        parameter_chunk, stays = layout.padded // parameter_shards, layout.chunk * group.whole
        return cls(group, layout.chunk, layout.padded, parameter_chunk, stays)

    @property
    def leaves(self) -> int:
        """Elements of the chunk whose optimizer state is offloaded."""
        return self.chunk - self.stays

    def gradient_on_device(self, plan: MemoryPlan) -> int:
        kept = plan.accumulator_bytes(self.group.dtype)
        if plan.policy.shards_gradients:
            return kept * self.stays
        shards = self.padded // self.chunk if self.chunk else 0
        return shards * (kept * self.stays + plan.gradient_bytes(self.group.dtype) * self.leaves)

    def state_on_device(self, plan: MemoryPlan) -> int:
        """Return the bytes of master weights and moments on the device. 32-bit parameters updated
        there are their own master weights, unless they are offloaded or steps send differences.
        """
        away = plan.param.on and not self.group.whole
        apart = away or self.group.dtype in SIXTEEN_BITS or (plan.differences and plan.shards > 1)
        master = MASTER_BYTES if apart else 0
        return (master + moment_bytes("fp32", plan.moments, 1)) * self.stays

    def one_bit_on_device(self, plan: MemoryPlan) -> int:
        """Return the bytes of a 1-bit optimizer after the freeze, which are whole on each rank:
        errors in 32 bits, exponents in 8, the momentum in 1 and, for 16-bit parameters, weights in
        32. Local steps add the rank's own momentum, its accumulated update, and the weights that
        modules compute with.
        """
        if not plan.one_bit or plan.shards == 1:
            return 0
        weights, computed = (4, 2) if self.group.dtype in SIXTEEN_BITS else (0, 4)
        local = (4 + 4 + computed) * self.padded if plan.local_steps else 0
        return (4 + 1 + weights) * self.padded + self.padded // 8 + local


def _offloaded(trainable: Sequence[_Laid], plan: MemoryPlan) -> tuple[int, int, int, int]:
    """Return bytes: state in RAM, state on disk, pieces between them, gradients in RAM."""
    gradients = sum(plan.gradient_bytes(flat.group.dtype) * flat.leaves for flat in trainable)
    kind, count = plan.optimizer.moments, plan.moments
    if plan.optimizer.device != "nvme":
        return (
            sum(
                MASTER_BYTES * flat.leaves + moment_bytes(kind, count, flat.leaves)
                for flat in trainable
            ),
            0,
            0,
            gradients,
        )
    limit = plan.optimizer.buffer_size
    on_disk = sum(_in_files(flat.leaves, limit, kind, count) for flat in trainable)
    buffer = _in_files(
        min(limit, max((flat.leaves for flat in trainable), default=0)), limit, kind, count
    )
    return 0, on_disk, pool_size(plan.optimizer.buffer_count) * buffer, gradients


def _in_files(numel: int, limit: int, kind: str, count: int) -> int:
    """Return the file bytes of master weights and moments of ``numel`` elements, in pieces of at
    most ``limit``. Each array of a piece starts at a page.
    """
    master, moment = StorageFormat(torch.float32), moment_format(kind, torch.float32)

    def piece(size: int) -> int:
        return size_in_file(master, size) + count * size_in_file(moment, size)

    return numel // limit * piece(limit) + piece(numel % limit)


def _parameters(flats: Sequence[_Laid], plan: MemoryPlan) -> tuple[int, int, int]:
    """Return bytes: parameter chunks in RAM, those on disk, units between them."""
    if not plan.param.on:
        return 0, 0, 0
    flats = [flat for flat in flats if not flat.group.whole]
    room = (
        plan.param.max_in_cpu
        if plan.param.device == "nvme"
        else sum(flat.parameter_chunk for flat in flats)
    )
    in_ram, in_files = 0, [0]
    for flat in flats:
        size = flat.parameter_chunk * flat.group.dtype.itemsize
        if flat.parameter_chunk <= room:
            room -= flat.parameter_chunk
            in_ram += size
        else:
            in_files.append(paged(size))
    return in_ram, sum(in_files), pool_size(plan.param.buffer_count) * max(in_files)


def unit_bytes(groups: Sequence[FlatParameters], plan: MemoryPlan) -> dict[str, int]:
    """Return the bytes of each gathered unit, in the order of the model."""
    whole: dict[str, int] = {}
    for group in plan.flats_of(groups):
        if not group.whole:
            flat = _Laid.of(group, plan)
            whole[group.unit] = whole.get(group.unit, 0) + flat.padded * group.dtype.itemsize
    return whole


def gathered_bytes(groups: Sequence[FlatParameters], plan: MemoryPlan) -> int:
    """Return the peak bytes of gathered units at stage 3: the root, one unit, and the units
    prefetched after it.
    """
    if not plan.policy.shards_parameters:
        return 0
    whole = unit_bytes(groups, plan)
    root, sizes = whole.pop("(root)", 0), list(whole.values())
    ahead = plan.prefetch * max((group.dtype.itemsize for group in groups), default=0)
    most = 0
    for order in (sizes, sizes[::-1]):
        for index, size in enumerate(order):
            following = order[index + 1 : index + 1 + (AHEAD if ahead else 0)]
            while len(following) > 1 and sum(following) > ahead:
                following = following[:-1]
            most = max(most, size + sum(following))
    return root + most


def gradient_buffers(groups: Sequence[FlatParameters], plan: MemoryPlan) -> int:
    """Return the bytes of gradients in transit and of the chunks that arrive for them, as many of
    each size as the engine keeps for the next unit.

    Whole gradients that are on the device anyway and in the communication dtype (stages 0 and 1)
    are sent without a copy.
    """
    policy = plan.policy
    sizes = Counter(
        (group.layout(plan.shards_of(group)).padded, plan.shards_of(group), group.dtype)
        for group in plan.flats_of(groups)
        if group.trainable
    )
    total = 0
    for (padded, shards, dtype), count in sizes.items():
        window = plan.gradient_bytes(dtype) if plan.ratio == 1.0 else plan.accumulator_bytes(dtype)
        copied = policy.shards_gradients or (dtype.itemsize < window and plan.ranks > 1)
        if copied and count > 1:
            total += IN_FLIGHT * dtype.itemsize * padded
        if shards > 1:
            total += min(count, shards) * dtype.itemsize * (padded // shards)
    return total


def _parts(*parts: tuple[str, int]) -> tuple[NamedBytes, ...]:
    return tuple(NamedBytes(what, nbytes) for what, nbytes in parts if nbytes)


def _files(*sections: tuple[tuple[str, ...], int]) -> tuple[tuple[str, int], ...]:
    """Return the bytes by folder. The folders of a section share its bytes equally."""
    by_folder: Counter[str] = Counter()
    for folders, nbytes in sections:
        for folder in folders if nbytes else ():
            by_folder[folder] += -(-nbytes // len(folders))
    return tuple(by_folder.items())
