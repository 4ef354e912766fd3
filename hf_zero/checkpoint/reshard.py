"""From what was saved to what is wanted: intersections of ranges, for any number of ranks, stage
and cut into units.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hf_zero.checkpoint.manifest import Manifest
from hf_zero.checkpoint.records import FlatEntry
from hf_zero.core.layout import FlatLayout


@dataclass(frozen=True)
class Run:
    """``length`` elements to copy: from ``source`` in tensor ``<flat.key>::…`` of ``files[file]``,
    to ``target``.

    ``source`` counts elements of the stored tensor (the chunk), ``target`` elements of what is
    being filled.
    """

    flat: FlatEntry
    chunk: int
    source: int
    target: int
    length: int


def parameter_runs(
    manifest: Manifest, name: str, start: int, stop: int, target: int = 0
) -> Iterator[Run]:
    """The runs that give elements ``[start, stop)`` of parameter ``name``, in order, without
    gaps.
    """
    flat, slot = manifest.slots[name]
    at, end = slot.offset + start, slot.offset + stop
    # the last of those that start there: earlier ones are empty
    index = bisect.bisect_right(flat.starts, at) - 1
    while at < end:
        chunk = flat.chunks[index]
        length = min(end, chunk.stop) - at
        if length > 0:
            yield Run(flat, index, at - chunk.start, target, length)
            at, target = at + length, target + length
        index += 1


def runs(
    manifest: Manifest, layout: FlatLayout, start: int, stop: int, held: dict[str, str]
) -> Iterator[Run]:
    """The runs that fill elements ``[start, stop)`` of ``layout``; ``target`` counts from
    ``start``.

    ``held`` maps the layout's names to the names in the manifest; what it lacks is left out.
    Neighbours that continue each other are merged: a resume on the same ranks reads each tensor in
    one piece.
    """
    last: Run | None = None
    for piece in layout.pieces(start, stop):
        if piece.name not in held:
            continue
        for run in parameter_runs(
            manifest, held[piece.name], piece.start, piece.stop, piece.offset - start
        ):
            if last and _continues(last, run):
                last = replace(last, length=last.length + run.length)
                continue
            if last:
                yield last
            last = run
    if last:
        yield last


def _continues(last: Run, run: Run) -> bool:
    same = last.flat is run.flat and last.chunk == run.chunk
    return (
        same and last.source + last.length == run.source and last.target + last.length == run.target
    )
