"""State dicts of an optimizer over segments: the position of each entry's elements, and entries for
segments that are cut elsewhere.

Segments are split in the course of a run (see zero/reduce/norm.py), so a state dict may have fewer
or more of them than exist when it is loaded. Elements are counted in the whole flat buffer, equally
on all ranks. The set of flat buffers depends on the units and on the parameters that stay whole
between steps; with others, a rank owns other elements, and ranks exchange the state of each
parameter.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.optim import state
from hf_zero.optim.segments import Flat, Segment, SegmentPart
from hf_zero.optim.sharded_tensors import ShardRanks

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


_PADDING = ""


class _Held(NamedTuple):
    """Elements ``[start, stop)`` of a parameter, stored by ``rank`` at ``offset`` of ``entry``."""

    start: int
    stop: int
    rank: int
    entry: int
    offset: int


class _Wanted(NamedTuple):
    """Elements ``[start, stop)`` of a parameter, or padding, at ``place`` in a flat buffer."""

    name: str
    start: int
    stop: int
    key: str
    place: int


@dataclass(frozen=True)
class _Entry:
    """The description of one entry of a state dict: its numbers, and its tensors' dtypes."""

    group: int
    numbers: dict[str, Any]
    dtypes: dict[str, torch.dtype]

    def same(self, other: _Entry) -> bool:
        return (self.group, self.dtypes) == (other.group, other.dtypes) and (
            {name: float(value) for name, value in self.numbers.items()}
            == {name: float(value) for name, value in other.numbers.items()}
        )


@dataclass
class _Made:
    """An entry of the new state dict: runs of ``(rank, entry, offset, length)``, rank -1 for
    padding, and their places in the flat buffers.
    """

    like: _Entry
    runs: list[tuple[int, int, int, int]] = field(default_factory=list)
    places: list[list[Any]] = field(default_factory=list)

    def add(self, held: tuple[int, int, int], wanted: _Wanted, start: int, stop: int) -> None:
        self.runs.append((*held, stop - start))
        place = wanted.place + start - wanted.start
        self.places.append([wanted.key, place, place + stop - start])


def over_flats(
    packed: dict[str, Any],
    flats: Iterable[Flat],
    segments: Sequence[Segment],
    ranks: ShardRanks,
    kind: str,
) -> dict[str, Any]:
    """Return ``packed``, a state dict of an optimizer of class ``kind``, converted for ``segments``
    of ``flats``: unchanged if it has the same flat buffers or does not name any. The conversion is
    collective: each of ``ranks`` passes its own dict of the same save.

    Raises UnsupportedOptimizerError on all ranks if the dicts do not have every element, or have
    state of whole tensors.
    """
    saved = packed.get(KEY, {}).get("layout")
    if saved is None or saved == layout_of(flats):
        return packed
    entries, held = _read(packed, ranks.rank, kind)
    own = [(each.group, _wanted(each)) for each in in_order(segments) if each.parts]
    every = ranks.gather_objects((entries, held, own))
    if any(isinstance(found, str) for found, *_ in every):
        raise UnsupportedOptimizerError(next(f for f, *_ in every if isinstance(f, str)))
    by_name: dict[str, list[_Held]] = {}
    for _, theirs, _ in every:
        for name, pieces in theirs.items():
            by_name.setdefault(name, []).extend(pieces)
    described = [found for found, *_ in every]
    made = [
        [
            each
            for group, want in wants
            for each in _entries(group, want, by_name, described, rank, kind)
        ]
        for rank, (*_, wants) in enumerate(every)
    ]
    received = _exchanged(packed, described, made, ranks)
    return _packed(packed, made[ranks.rank], received, described)


def _read(
    packed: Mapping[str, Any], rank: int, kind: str
) -> tuple[list[_Entry] | str, dict[str, list[_Held]]]:
    """Return this rank's entries, or why they cannot be exchanged, and their elements."""
    told = packed[KEY]
    groups = [index for index, group in enumerate(packed["param_groups"]) for _ in group["params"]]
    entries: list[_Entry] = []
    held: dict[str, list[_Held]] = {}
    for number, places in enumerate(told["places"]):
        at = 0
        for key, start, stop in places:
            for name, first, numel in told["layout"][key]:
                a, b = max(first, start), min(first + numel, stop)
                if a < b:
                    piece = _Held(a - first, b - first, rank, number, at + a - start)
                    held.setdefault(name, []).append(piece)
            at += stop - start
        numbers: dict[str, Any] = {}
        dtypes: dict[str, torch.dtype] = {}
        for name, value in packed["state"].get(number, {}).items():
            if state.is_elementwise(name, value, (at or 1,)):
                dtypes[name] = value.dtype
            elif isinstance(value, Tensor) and value.numel() == 1:
                numbers[name] = value.detach().cpu().clone()
            elif isinstance(value, (int, float)):
                numbers[name] = value
            else:
                return (
                    f"a state dict of optimizer {kind} was saved with other parameters that stay "
                    f"whole, or other units, and its state {name!r} is of whole tensors, which "
                    "ranks do not exchange; load it as it was saved, or use load_checkpoint"
                ), {}
        entries.append(_Entry(groups[number], numbers, dtypes))
    return entries, held


def _wanted(segment: Segment) -> list[_Wanted]:
    """Return the elements of ``segment``, parameter by parameter, with the padding between."""
    found = []
    for part in segment.parts:
        key, first = part.flat.key, part.flat.owned[0]
        at, end = first + part.start, first + part.stop
        for piece in part.flat.layout.pieces(at, end):
            if at < piece.offset:
                found.append(_Wanted(_PADDING, 0, piece.offset - at, key, at))
            found.append(_Wanted(piece.name, piece.start, piece.stop, key, piece.offset))
            at = piece.offset + piece.stop - piece.start
        if at < end:
            found.append(_Wanted(_PADDING, 0, end - at, key, at))
    return found


def _entries(
    group: int,
    wanted: list[_Wanted],
    by_name: Mapping[str, list[_Held]],
    described: Sequence[list[_Entry]],
    rank: int,
    kind: str,
) -> list[_Made]:
    """Return the new entries for one segment of ``group``: as few as their step counts allow."""
    made: list[_Made] = []
    waiting: list[_Wanted] = []  # padding before the first element
    for each in wanted:
        if each.name == _PADDING:
            if made:
                made[-1].add((-1, 0, 0), each, each.start, each.stop)
            else:
                waiting.append(each)
            continue
        at = each.start
        while at < each.stop:
            fitting = [h for h in by_name.get(each.name, ()) if h.start <= at < h.stop]
            if not fitting:
                raise UnsupportedOptimizerError(
                    f"the state dicts of optimizer {kind} have nothing for element {at} of "
                    f"{each.name!r}: they were saved on another number of ranks, or for another "
                    "model. load_checkpoint takes what save_checkpoint wrote on any ranks"
                )
            piece = min(fitting, key=lambda held: held.rank != rank)
            stop, like = min(piece.stop, each.stop), described[piece.rank][piece.entry]
            if not made or not made[-1].like.same(like):
                made.append(_Made(like))
                for gap in waiting:
                    made[-1].add((-1, 0, 0), gap, gap.start, gap.stop)
                waiting = []
            offset = piece.offset + at - piece.start
            made[-1].add((piece.rank, piece.entry, offset), each, at, stop)
            at = stop
    if waiting:  # a segment of nothing but padding
        some = (entry for entries in described for entry in entries if entry.group == group)
        made.append(_Made(next(some)))
        for gap in waiting:
            made[-1].add((-1, 0, 0), gap, gap.start, gap.stop)
    return made


def _exchanged(
    packed: Mapping[str, Any],
    described: Sequence[list[_Entry]],
    made: Sequence[list[_Made]],
    ranks: ShardRanks,
) -> dict[str, list[Tensor]]:
    """Return by state the elements that each rank sends to this one, in the order of entries."""
    names = {
        name: dtype
        for entries in described
        for entry in entries
        for name, dtype in entry.dtypes.items()
    }
    received = {}
    for name in sorted(names):

        def runs(source: int, target: int, name: str = name) -> Iterator[tuple[int, int, int]]:
            for each in made[target]:
                if name in each.like.dtypes:
                    yield from (run[1:] for run in each.runs if run[0] == source)

        mine = [list(runs(ranks.rank, target)) for target in range(ranks.size)]
        parts = [
            packed["state"][entry][name][offset : offset + length]
            for each in mine
            for entry, offset, length in each
        ]
        sent = torch.cat(parts) if parts else torch.empty(0, dtype=names[name])
        sizes = [sum(run[2] for run in each) for each in mine]
        counts = [sum(run[2] for run in runs(source, ranks.rank)) for source in range(ranks.size)]
        received[name] = list(ranks.exchange(sent, sizes, counts))
    return received


def _packed(
    packed: Mapping[str, Any],
    made: list[_Made],
    received: Mapping[str, list[Tensor]],
    described: Sequence[list[_Entry]],
) -> dict[str, Any]:
    """Return the new state dict, with an entry of no elements for each group, for stand-ins."""
    known = [entry for entries in described for entry in entries]
    for group in range(len(packed["param_groups"])):
        like = next((entry for entry in known if entry.group == group), None)
        made = [*made, _Made(like)] if like is not None else made
    made = sorted(made, key=lambda each: each.like.group)
    at = {name: [0] * len(parts) for name, parts in received.items()}
    entries: dict[int, dict[str, Any]] = {}
    for number, each in enumerate(made):
        entry = {name: state.copied(value) for name, value in each.like.numbers.items()}
        for name, dtype in each.like.dtypes.items():
            parts = []
            for source, _, _, length in each.runs:
                if source < 0:
                    parts.append(torch.zeros(length, dtype=dtype))
                    continue
                start = at[name][source]
                parts.append(received[name][source][start : start + length].cpu())
                at[name][source] += length
            entry[name] = torch.cat(parts) if parts else torch.zeros(1, dtype=dtype)
        if entry:
            entries[number] = entry
    groups = [
        {**group, "params": [n for n, each in enumerate(made) if each.like.group == index]}
        for index, group in enumerate(packed["param_groups"])
    ]
    told = {"places": [each.places for each in made], "parted": packed[KEY]["parted"]}
    return {**packed, "state": entries, "param_groups": groups, KEY: told}
