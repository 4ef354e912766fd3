"""Optimizer state of segments whose state is on the device: created by the optimizer, kept so that
each state of a flat buffer is one view.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_zero.optim import state
from hf_zero.optim.table import Flat, MemoryRegion, Segment, cut


class StateEntries:
    """Access to the entries of ``optimizer.state`` by segment."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's live ``param_groups``."""
        return self.optimizer.param_groups

    def of(self, segment: Segment) -> dict[str, Any]:
        """Return the state of ``segment`` by name; empty if it has none."""
        tensor = segment.tensor
        return state.kept(self.optimizer.state[tensor]) if tensor in self.optimizer.state else {}

    def elementwise(self, segment: Segment) -> dict[str, Tensor]:
        """Return the states of ``segment`` that have a number for each element."""
        shape = segment.tensor.shape
        return {
            name: value
            for name, value in self.of(segment).items()
            if state.is_elementwise(name, value, shape)
        }

    def numbers(self, segment: Segment) -> dict[str, float]:
        """Return the states of ``segment`` that are one number for all elements."""
        shape = segment.tensor.shape
        return {
            name: float(value)
            for name, value in self.of(segment).items()
            if state.is_scalar(name, value, shape)
        }

    def fresh(self, group: int, like: Tensor) -> dict[str, Any]:
        """Return the state before the first step of a parameter like ``like`` in ``group``."""
        return state.fresh_state(self.optimizer, self.groups[group], like)

    def some_group_keeps(self, name: str, like: Tensor) -> bool:
        """Whether a group keeps a state ``name`` for a parameter like ``like``."""
        return any(name in self.fresh(group, like) for group in range(len(self.groups)))


class DeviceState:
    """The state of segments on the device, by region (``table.py``)."""

    def __init__(self, entries: StateEntries) -> None:
        self._entries = entries
        self.regions: list[MemoryRegion] = []
        self._region_of: dict[str, tuple[MemoryRegion, int]] = {}  # and offset in it
        # whether each state of a region is known to be in one piece of memory
        self._together = False

    def cut(self, flats: Sequence[Flat], group_of: Mapping[str, int]) -> None:
        """Cut ``flats``, whose state is on the device, into bound segments without state."""
        self._together = False
        self.regions = cut(flats, group_of)
        self._region_of = {
            flat.key: (region, base) for region in self.regions for flat, base in region.flats
        }

    def bind(self, segment: Segment) -> None:
        """Give ``segment``, cut out of another one, its tensor."""
        segment.bind()

    def create(self, segment: Segment) -> None:
        """Create the state of ``segment`` as of before its first step, if it has none."""
        if self._entries.of(segment):
            return
        for name, value in self._entries.fresh(segment.group, segment.tensor).items():
            if state.is_elementwise(name, value, (1,)):
                value = value.expand(segment.tensor.shape).clone()
            self._entries.optimizer.state[segment.tensor][name] = value

    def unstep(self, segment: Segment) -> None:
        """Remove the state of ``segment``, as if it had never been stepped."""
        self._entries.optimizer.state.pop(segment.tensor, None)

    def put(self, segment: Segment, name: str, at: int, values: Tensor) -> None:
        """Write ``values`` into state ``name`` of ``segment``, starting at element ``at``."""
        live = self._entries.optimizer.state[segment.tensor]
        if name not in live:
            live[name] = torch.zeros_like(segment.tensor)
        live[name][at : at + values.numel()].copy_(values)

    def tensors(self, flat: Flat) -> dict[str, Tensor]:
        """Return each per-element state of ``flat`` as a writable view, 1-D over ``flat.owned``."""
        if flat.key not in self._region_of:
            return {}
        self.bring_together()
        region, base = self._region_of[flat.key]
        numel, out = flat.owned[1] - flat.owned[0], {}
        for segment in region.segments:
            if any(part.flat is flat for part in segment.parts):
                for name, home in self._homes(region, segment).items():
                    out[name] = home[base : base + numel]
        return out

    def address(self, flat: Flat, name: str) -> int:
        """Return the address of the first number of state ``name`` of ``flat``; 0 if missing."""
        for segment in self._region_of[flat.key][0].segments:
            for part in segment.parts:
                if part.flat is flat and name in self._entries.of(segment):
                    held: Tensor = self._entries.optimizer.state[segment.tensor][name]
                    return held.data_ptr() + (part.offset - part.start) * held.itemsize
        return 0

    def stepped(self, together: bool | None) -> None:
        """Update the bookkeeping after a step of the optimizer. ``together``: True: its states are
        placed as :meth:`bring_together` leaves them; False: segments may have got their first
        state, which is moved together on demand; None: they may have, and it is moved together now.
        """
        if together is not None:
            self._together = together
        elif not self._together:
            self.bring_together()

    def bring_together(self) -> None:
        """Keep each state of a region of several segments in one piece of memory, so that flat
        buffers have views of it.

        torch creates state segment by segment, in the first step. The move costs one state of one
        region at a time.
        """
        for region in self.regions:
            for segment in region.segments:
                self._refuse_unknown(segment)
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
                    self._gather_home(region, name)
        self._together = True

    def _refuse_unknown(self, segment: Segment) -> None:
        shape = segment.tensor.shape
        for name, value in self._entries.of(segment).items():
            if not (
                isinstance(value, Mapping)
                or state.is_scalar(name, value, shape)
                or state.is_elementwise(name, value, shape)
            ):
                what = f"a segment of {segment.parts[0].flat.key!r}"
                state.refuse_unknown(self._entries.optimizer, name, value, what)

    def _homes(self, region: MemoryRegion, segment: Segment) -> dict[str, Tensor]:
        """Return for each state of ``segment`` the tensor over the whole region that it is a slice
        of (after :meth:`bring_together`).
        """
        return {
            name: value.as_strided((region.numel,), (1,), value.storage_offset() - segment.start)
            for name, value in self._entries.elementwise(segment).items()
        }

    def _gather_home(self, region: MemoryRegion, name: str) -> None:
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
        home = values[0].new_zeros(region.numel)
        for other in region.segments:
            if other not in owners:  # not stepped yet: the initial value of its state
                first = entries.fresh(other.group, other.tensor).get(name)
                if first is not None:
                    home[other.start : other.stop] = first
        for owner, value in zip(owners, values):
            home[owner.start : owner.stop].copy_(value)
            entries.optimizer.state[owner.tensor][name] = home[owner.start : owner.stop]


def replace_segments(
    regions: Iterable[MemoryRegion], pieces: Mapping[Segment, Sequence[Segment]]
) -> None:
    """Replace segments in ``regions`` by their ``pieces``."""
    for region in regions:
        region.segments = [
            piece for segment in region.segments for piece in pieces.get(segment, [segment])
        ]
