"""Optimizer state of the segments on the device: created segment by segment, then brought together,
so that each state of a flat buffer is one view.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from hf_zero.offload.storage import MASTER
from hf_zero.ops.moment_blocks import Blocks
from hf_zero.optim.segments import (
    FetchedArrays,
    Flat,
    MemoryRegion,
    ParamState,
    Segment,
    SegmentPart,
    StateArrays,
    cut,
    masters,
)
from hf_zero.optim.state import (
    StateEntries,
    is_elementwise,
    is_scalar,
    refuse_unknown,
    step_dtype,
)


class DeviceState:
    """The state of segments on the device, by region (``segments.py``)."""

    def __init__(self, entries: StateEntries) -> None:
        self._entries = entries
        self.regions: list[MemoryRegion] = []
        self._region_of: dict[str, tuple[MemoryRegion, int]] = {}  # and offset in it
        # whether each state of a region is known to be in one piece of memory; the first step
        # creates state segment by segment
        self.together = False

    @cached_property
    def begins_rounded(self) -> bool:
        """Whether a bf16 state of some group has a nonzero initial value."""
        groups, like = range(len(self._entries.groups)), torch.zeros(1)
        bf16 = self._entries.bf16
        return bf16 is not None and any(
            value.dtype == torch.bfloat16 and bool(value)
            for group in groups
            if bf16.moments
            for name, value in self._entries.initial(group, like).items()
            if is_elementwise(name, value, (1,))
        )

    def cut(self, flats: Sequence[Flat], group_of: Mapping[str, int]) -> None:
        """Cut ``flats``, whose state is on the device, into bound segments without state."""
        self.together = False
        self.regions = cut(flats, group_of)
        self._region_of = {
            flat.key: (region, base) for region in self.regions for flat, base in region.flats
        }

    def bind(self, segment: Segment) -> None:
        """Give ``segment``, cut out of another one, its tensor."""
        segment.bind()

    def create(self, segment: Segment) -> None:
        """Create the initial state of ``segment``, if it has none."""
        if self._entries.of(segment):
            return
        self.together = False
        for name, value in self._entries.initial(segment.group, segment.tensor).items():
            if is_elementwise(name, value, (1,)):
                value = self._entries.created(segment, name, value)
            self._entries.optimizer.state[segment.tensor][name] = value

    def unstep(self, segment: Segment) -> None:
        """Remove the state of ``segment``, as if it had never been stepped."""
        self._entries.optimizer.state.pop(segment.tensor, None)

    def put(self, segment: Segment, name: str, at: int, values: Tensor) -> None:
        """Write ``values`` into state ``name`` of ``segment``, starting at element ``at``."""
        live = self._entries.optimizer.state[segment.tensor]
        if name not in live:
            dtype = step_dtype(segment.tensor.dtype)
            live[name] = torch.zeros_like(segment.tensor, dtype=dtype)
        if isinstance(live[name], Blocks):
            live[name].put(at, values)
            return
        live[name][at : at + values.numel()].copy_(values)

    def arrays(self, flat: Flat) -> Mapping[str, Tensor]:
        """Return the master weights and each per-element state of ``flat``, 1-D over
        ``flat.owned``: writable views, or states in new memory if its region has some in 8 bits.
        """
        arrays = {MASTER: masters(flat)}
        if flat.key not in self._region_of:  # no element of it is on this rank
            return arrays
        self.bring_together()
        region, base = self._region_of[flat.key]
        if self._has_blocks(region):
            dtypes = {MASTER: arrays[MASTER].dtype} | self._dtypes(flat)
            states = self._states(flat, dtypes)  # now: a save decodes on a thread of its own

            def read(name: str) -> Tensor:
                if name in arrays:
                    return arrays[name]
                return _decoded(name, states, torch.zeros_like(arrays[MASTER], dtype=dtypes[name]))

            return FetchedArrays(dtypes, read)
        numel = flat.owned[1] - flat.owned[0]
        for segment in region.segments:
            if segment.start < base + numel and base < segment.stop:
                for name, whole in self._region_tensors(region, segment).items():
                    arrays[name] = whole[base : base + numel]
        return arrays

    def _has_blocks(self, region: MemoryRegion) -> bool:
        return any(self._entries.blocks(segment) for segment in region.segments)

    def _parts(self, flat: Flat) -> Iterator[tuple[Segment, SegmentPart]]:
        for segment in self._region_of[flat.key][0].segments:
            for part in segment.parts:
                if part.flat is flat:
                    yield segment, part

    def _dtypes(self, flat: Flat) -> dict[str, torch.dtype]:
        """Return the dtypes of the per-element states of ``flat`` by name; blocks count as
        decoded.
        """
        return {
            name: torch.float32 if isinstance(value, Blocks) else value.dtype
            for segment, _ in self._parts(flat)
            for name, value in sorted(self._entries.of(segment).items())
            if self._is_kept(segment, name, value)
        }

    def _states(
        self, flat: Flat, names: Collection[str]
    ) -> list[tuple[SegmentPart, ParamState, ParamState]]:
        """Return each part of ``flat`` with the state of its segment, and with its initial state if
        it lacks some of ``names``.
        """
        first: dict[int, ParamState] = {}  # by group
        states = []
        for segment, part in self._parts(flat):
            of, group = self._entries.of(segment), segment.group
            lacks = any(name != MASTER and name not in of for name in names)
            if lacks and group not in first:
                first[group] = self._entries.initial(group, segment.tensor)
            states.append((part, of, first[group] if lacks else {}))
        return states

    def _is_kept(self, segment: Segment, name: str, value: object) -> bool:
        return isinstance(value, Blocks) or is_elementwise(name, value, segment.tensor.shape)

    def memory(self, flat: Flat) -> list[Tensor]:
        """Return the tensors that hold the per-element states of ``flat``."""
        if flat.key not in self._region_of:
            return []
        self.bring_together()
        if not self._has_blocks(self._region_of[flat.key][0]):
            return [values for name, values in self.arrays(flat).items() if name != MASTER]
        tensors: list[Tensor] = []
        for segment, part in self._parts(flat):
            numel = part.stop - part.start
            for name, value in self._entries.of(segment).items():
                if isinstance(value, Blocks):
                    blocks = value.narrow(part.offset, numel)
                    tensors += [blocks.codes, blocks.scales]
                elif self._is_kept(segment, name, value):
                    tensors.append(value[part.offset : part.offset + numel])
        return tensors

    def address(self, flat: Flat, name: str) -> int:
        """Return the address of the first number of state ``name`` of ``flat``; 0 if missing.
        :meth:`arrays` may move it.
        """
        for segment in self._region_of[flat.key][0].segments:
            for part in segment.parts:
                if part.flat is flat and name in self._entries.of(segment):
                    value: Tensor = self._entries.optimizer.state[segment.tensor][name]
                    return value.data_ptr() + (part.offset - part.start) * value.itemsize
        return 0

    def bring_together(self) -> None:
        """Keep each state of a region of several segments in one piece of memory, so that flat
        buffers have views of it.

        torch creates state segment by segment, in the first step. The move costs one state of one
        region at a time.
        """
        for region in self.regions:
            for segment in region.segments:
                self._refuse_unknown(segment)
            if self._has_blocks(region):
                continue
            whole = (
                len(region.segments) == 1
                and region.segments[0].stop - region.segments[0].start == region.numel
            )
            if not whole:
                names = {
                    name
                    for segment in region.segments
                    for name in self._entries.elementwise(segment)
                }
                for name in sorted(names):
                    self._gather_in_region(region, name)
        self.together = True

    def _refuse_unknown(self, segment: Segment) -> None:
        shape = segment.tensor.shape
        for name, value in self._entries.of(segment).items():
            if not (
                isinstance(value, Mapping)
                or (isinstance(value, Blocks) and value.dynamic)
                or is_scalar(name, value, shape)
                or is_elementwise(name, value, shape)
            ):
                what = f"a segment of {segment.parts[0].flat.key!r}"
                refuse_unknown(self._entries.optimizer, name, value, what)

    def _region_tensors(self, region: MemoryRegion, segment: Segment) -> dict[str, Tensor]:
        """Return for each state of ``segment`` the tensor over the whole region that it is a slice
        of (after :meth:`bring_together`).
        """
        return {
            name: value.as_strided((region.numel,), (1,), value.storage_offset() - segment.start)
            for name, value in self._entries.elementwise(segment).items()
        }

    def _gather_in_region(self, region: MemoryRegion, name: str) -> None:
        entries = self._entries
        owners = [segment for segment in region.segments if name in entries.elementwise(segment)]
        values = [entries.optimizer.state[segment.tensor][name] for segment in owners]
        origins = {
            (value.untyped_storage()._cdata, value.storage_offset() - owner.start)
            for owner, value in zip(owners, values)
        }
        size = values[0].untyped_storage().nbytes() // values[0].element_size()
        if (
            len(origins) == 1
            and next(iter(origins))[1] >= 0
            and size - next(iter(origins))[1] >= region.numel
        ):
            return
        whole = values[0].new_zeros(region.numel)
        for other in region.segments:
            if other not in owners:  # not stepped yet: the initial value of its state
                first = entries.initial(other.group, other.tensor).get(name)
                if first is not None:
                    whole[other.start : other.stop] = first
        for owner, value in zip(owners, values):
            whole[owner.start : owner.stop].copy_(value)
            entries.optimizer.state[owner.tensor][name] = whole[owner.start : owner.stop]


def _decoded(
    name: str,
    states: Sequence[tuple[SegmentPart, StateArrays, StateArrays]],
    out: Tensor,
) -> Tensor:
    """Return ``out`` [owned], filled with the state ``name`` of the parts in ``states``."""
    for part, of, first in states:
        value, target = of.get(name), out[part.start : part.stop]
        at, stop = part.offset, part.offset + part.stop - part.start
        if isinstance(value, Blocks):
            target.copy_(value.narrow(at, stop - at).decode())
        elif value is not None:
            target.copy_(value[at:stop])
        else:
            target[:] = first.get(name, 0.0)
    return out
