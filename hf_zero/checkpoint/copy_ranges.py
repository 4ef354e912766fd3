"""Element ranges of a load or a conversion, mapped to the stored ranges that hold them, for any
number of ranks, stage and division into units.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter

from hf_zero.checkpoint.manifest import FlatEntry, Manifest
from hf_zero.zero.layout.flat_layout import FlatLayout, Slot


@dataclass(frozen=True)
class CopyRange:
    """One contiguous copy from a saved chunk into the tensor being loaded: ``length`` elements of
    tensor ``<flat.key>::…`` in the file of chunk number ``chunk``.

    ``source`` is their offset in the stored tensor (the chunk), ``target`` their offset in the
    tensor to fill, both in elements.
    """

    flat: FlatEntry
    chunk: int
    source: int
    target: int
    length: int

    def is_continued_by(self, following: CopyRange) -> bool:
        """Return whether one copy does both."""
        same = self.flat is following.flat and self.chunk == following.chunk
        ends = self.source + self.length, self.target + self.length
        return same and ends == (following.source, following.target)


def parameter_ranges(
    manifest: Manifest, name: str, start: int, stop: int, target: int = 0
) -> Iterator[CopyRange]:
    """Yield the ranges that hold elements ``[start, stop)`` of the whole parameter ``name``, in
    order, without gaps.
    """
    parts = manifest.parts[name]
    flat, slot = parts[0]
    stretches: Iterable[tuple[int, FlatEntry, int, int]] = [
        (start, flat, slot.offset + start, stop - start)
    ]
    if slot.box is not None:
        stretches = heapq.merge(
            *(_stretches(flat, slot, start, stop) for flat, slot in parts), key=itemgetter(0)
        )
    for _, flat, at, numel in stretches:
        yield from _chunk_ranges(flat, at, numel, target)
        target += numel


def _chunk_ranges(flat: FlatEntry, at: int, numel: int, target: int) -> Iterator[CopyRange]:
    """Yield the ranges that hold ``numel`` elements of ``flat`` from ``at`` on."""
    end = at + numel
    # the last chunk that starts at or before `at`: others with the same start are empty
    index = bisect.bisect_right(flat.starts, at) - 1
    while at < end:
        chunk = flat.chunks[index]
        length = min(end, chunk.stop) - at
        if length > 0:
            yield CopyRange(flat, index, at - chunk.start, target, length)
            at, target = at + length, target + length
        index += 1


def _stretches(
    flat: FlatEntry, slot: Slot, start: int, stop: int
) -> Iterator[tuple[int, FlatEntry, int, int]]:
    """Yield the elements ``[start, stop)`` of a whole parameter that one of its parts holds, as
    (element of the parameter, flat, element of the flat, length).
    """
    assert slot.box is not None
    for run in slot.box.runs_within(start, stop):
        yield run.place, flat, slot.offset + run.at, run.length


def copy_ranges(
    manifest: Manifest, layout: FlatLayout, start: int, stop: int, names: dict[str, str]
) -> Iterator[CopyRange]:
    """Yield the ranges that fill elements ``[start, stop)`` of ``layout``; ``target`` counts from
    ``start``.

    ``names`` maps the layout's names to those in the manifest; names that it lacks are left out.
    Consecutive ranges that are contiguous are merged, so that a resume on the same ranks reads each
    tensor in one piece.
    """
    last: CopyRange | None = None
    for following in _ranges_of_pieces(manifest, layout, start, stop, names):
        if last and last.is_continued_by(following):
            last = replace(last, length=last.length + following.length)
            continue
        if last:
            yield last
        last = following
    if last:
        yield last


def _ranges_of_pieces(
    manifest: Manifest, layout: FlatLayout, start: int, stop: int, names: dict[str, str]
) -> Iterator[CopyRange]:
    """Yield the ranges of :func:`copy_ranges`, not merged."""
    for piece in list(layout.pieces(start, stop)):
        if piece.name not in names:
            continue
        name, numel = names[piece.name], piece.stop - piece.start
        box, target = layout.by_name[piece.name].box, piece.offset - start
        saved = () if box is None else manifest.parts[name]
        equal = next(((flat, slot) for flat, slot in saved if slot.box == box), None)
        if box is None:
            yield from parameter_ranges(manifest, name, piece.start, piece.stop, target)
        elif equal is not None:  # cut as it was saved: no range for each row
            flat, slot = equal
            yield from _chunk_ranges(flat, slot.offset + piece.start, numel, target)
        else:
            for part in box.runs(piece.start, piece.stop):
                offset = target + part.at - piece.start
                end = part.place + part.length
                yield from parameter_ranges(manifest, name, part.place, end, offset)
