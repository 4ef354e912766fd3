"""State dicts of an optimizer over segments: the position of each entry's elements, and entries for
segments that are cut elsewhere.

Segments are split in the course of a run (see zero/reduce/usage.py), so a state dict may have fewer
or more of them than exist when it is loaded. Elements are counted in the whole flat buffer, equally
on all ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.optim import state
from hf_zero.optim.table import Flat, Segment, SegmentPart

KEY = "segments"  # the entry of a state dict
Layout = dict[str, list[list[Any]]]


def layout_of(flats: Iterable[Flat]) -> Layout:
    """Return [name, offset, elements] of each parameter, by flat buffer. Equal on every rank."""
    return {
        flat.key: [[slot.name, slot.offset, slot.numel] for slot in flat.layout.slots]
        for flat in flats
    }


def in_order(segments: Sequence[Segment]) -> list[Segment]:
    """Return ``segments`` in the order of a state dict's entries: group by group."""
    return sorted(segments, key=lambda segment: segment.group)


def described(
    packed: Mapping[str, Any],
    segments: Sequence[Segment],
    parted: Iterable[int],
    flats: Iterable[Flat],
) -> dict[str, Any]:
    """Return ``packed``, a state dict over ``segments`` of ``flats``, with their positions added;
    ``parted``: the groups whose parameters have made different numbers of steps.
    """
    places = [
        [
            [part.flat.key, part.flat.owned[0] + part.start, part.flat.owned[0] + part.stop]
            for part in segment.parts
        ]
        for segment in in_order(segments)
    ]
    told = {"places": places, "parted": sorted(parted), "layout": layout_of(flats)}
    return {**packed, KEY: told}


@dataclass(frozen=True)
class Extent:
    """Elements ``[start, stop)`` of a flat buffer, stored at ``offset`` of entry ``entry``."""

    start: int
    stop: int
    entry: int
    offset: int


@dataclass(frozen=True)
class Saved:
    """A state dict with the positions of its segments.

    ``extents`` are ascending, by flat buffer; ``groups`` and ``numels`` are those of each entry, 0
    elements for a stand-in.
    """

    kind: str  # class name of the optimizer
    packed: Mapping[str, Any]
    parted: frozenset[int]
    extents: Mapping[str, list[Extent]]
    groups: list[int]
    numels: list[int]

    def borders(self, segment: Segment) -> list[int]:
        """Return the places in ``segment``, counted from its start, where an entry begins."""
        return [place for place, _, _ in self._entries(segment)][1:]

    def over(self, segments: Sequence[Segment]) -> dict[str, Any]:
        """Return the state dict for ``segments``, each of which must be within one entry."""
        ordered = in_order(segments)
        entries = {}
        for number, segment in enumerate(ordered):
            entry = self._of(segment) if segment.parts else self._stand_in(segment.group)
            if entry:
                entries[number] = entry
        groups = [
            {**group, "params": [n for n, segment in enumerate(ordered) if segment.group == index]}
            for index, group in enumerate(self.packed["param_groups"])
        ]
        return {**self.packed, "state": entries, "param_groups": groups}

    def _of(self, segment: Segment) -> dict[str, Any]:
        ((_, number, start),) = self._entries(segment)
        entry, numel = self.packed["state"].get(number, {}), self.numels[number]
        stop = start + segment.stop - segment.start
        if stop - start == numel:
            return dict(entry)
        return state.narrowed(entry, (numel,), start, stop)

    def _stand_in(self, group: int) -> dict[str, Any]:
        """Return the state of a stand-in, for a rank that owns no element of ``group``."""
        own = [number for number, each in enumerate(self.groups) if each == group]
        for number in sorted(own, key=self.numels.__getitem__):
            entry = self.packed["state"].get(number, {})
            entry = {name: value for name, value in entry.items() if not isinstance(value, Mapping)}
            if not self.numels[number]:
                return entry
            numbers = state.narrowed(entry, (self.numels[number],), 0, 1)
            return {
                name: value.clone() if state.is_elementwise(name, value, (1,)) else value
                for name, value in numbers.items()
            }
        return {}

    def _entries(self, segment: Segment) -> list[tuple[int, int, int]]:
        """Return (place in the segment, entry, place in the entry) of each run of one entry."""
        found: list[tuple[int, int, int]] = []
        for part in segment.parts:
            first = part.flat.owned[0] + part.start
            for extent, start in self._overlapping(segment.group, part):
                place = part.offset + start - first
                at = extent.offset + start - extent.start
                if not found or found[-1][1:] != (extent.entry, at - place + found[-1][0]):
                    found.append((place, extent.entry, at))
        return found

    def _overlapping(self, group: int, part: SegmentPart) -> Iterator[tuple[Extent, int]]:
        """Yield the extents that hold the elements of ``part``, with its first element in each."""
        key, first = part.flat.key, part.flat.owned[0]
        start, stop = first + part.start, first + part.stop
        extents = self.extents.get(key, [])
        at = bisect_right(extents, start, key=lambda extent: extent.start) - 1
        while start < stop:
            extent = extents[at] if 0 <= at < len(extents) else None
            if extent is None or not extent.start <= start < extent.stop:
                raise UnsupportedOptimizerError(
                    f"a state dict of optimizer {self.kind} has nothing for element {start} of "
                    f"{key!r}, which this rank keeps: it was saved by another rank, with another "
                    "number of ranks, at stage 0, or for another model. load_checkpoint takes what "
                    "save_checkpoint wrote on any ranks and at any stage."
                )
            if self.groups[extent.entry] != group:
                raise UnsupportedOptimizerError(
                    f"a state dict of optimizer {self.kind} has element {start} of {key!r} in "
                    f"group {self.groups[extent.entry]}, here it is in group {group}; "
                    "build the optimizer with the groups it was saved with"
                )
            yield extent, start
            start, at = extent.stop, at + 1


def read(packed: Mapping[str, Any], kind: str) -> Saved | None:
    """Parse ``packed``, of an optimizer of class ``kind``; None if it has no positions of its
    segments.
    """
    described = packed.get(KEY)
    if described is None:
        return None
    extents: dict[str, list[Extent]] = {}
    numels = []
    for entry, places in enumerate(described["places"]):
        offset = 0
        for key, start, stop in places:
            extents.setdefault(key, []).append(Extent(start, stop, entry, offset))
            offset += stop - start
        numels.append(offset)
    for each in extents.values():
        each.sort(key=lambda extent: extent.start)
    groups = [index for index, group in enumerate(packed["param_groups"]) for _ in group["params"]]
    return Saved(kind, packed, frozenset(described["parted"]), extents, groups, numels)
