"""The part of a whole tensor on a rank of a tensor- or expert-parallel group. Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from hf_zero.logging import JsonObject

Cut = tuple[int, int]


class BoxRun(NamedTuple):
    """A contiguous run of ``length`` elements: it starts at ``at`` of the flattened part and at
    ``place`` of the flattened whole tensor.
    """

    at: int
    place: int
    length: int


@dataclass(frozen=True)
class Box:
    """A part of a tensor of shape ``whole``: the given half-open ranges, concatenated, along each
    dimension in ``cuts``, and every other dimension in full.

    ``Box((8, 4), ((0, ((2, 4),)),))`` is rows 2 and 3. A matrix that packs two (gate and up) is cut
    in both: ``Box((8, 4), ((0, ((0, 2), (4, 6))),))``.
    """

    whole: tuple[int, ...]
    cuts: tuple[tuple[int, tuple[Cut, ...]], ...]

    def __post_init__(self) -> None:
        dims = [dim for dim, _ in self.cuts]
        if sorted(set(dims)) != dims or any(not 0 <= dim < len(self.whole) for dim in dims):
            raise ValueError(
                f"a box of a tensor of shape {self.whole} is cut along {dims}; name dimensions it "
                "has, each once and in their order"
            )
        for dim, ranges in self.cuts:
            ends = [0, *(end for cut in ranges for end in cut), self.whole[dim]]
            if ends != sorted(ends):
                raise ValueError(
                    f"the ranges {list(ranges)} of dimension {dim} of a tensor of shape "
                    f"{self.whole} must follow one another within it"
                )

    @classmethod
    def even(cls, whole: Sequence[int], dim: int, rank: int, size: int, packed: int = 1) -> Box:
        """Return the part of ``rank`` of ``size`` ranks when dimension ``dim``, or each of its
        ``packed`` equal blocks, is cut into equal parts.

        Raises ValueError if it cannot be cut evenly.
        """
        length = whole[dim]
        if length % (size * packed):
            raise ValueError(
                f"dimension {dim} of a tensor of shape {tuple(whole)} cannot be cut into {packed} "
                f"x {size} equal parts; choose a size that divides {length // packed}"
            )
        block, part = length // packed, length // packed // size
        starts = [at * block + rank * part for at in range(packed)]
        return cls(tuple(whole), ((dim, tuple((at, at + part) for at in starts)),))

    def further(self, dim: int, rank: int, size: int, packed: int = 1) -> Box:
        """Cut this part along another dimension and return the part of ``rank`` of ``size`` ranks.
        Arguments and errors as :meth:`even`; also raises ValueError if ``dim`` is cut already.
        """
        if dim in dict(self.cuts):
            raise ValueError(
                f"dimension {dim} of a tensor of shape {self.whole} is cut already; cut another"
            )
        cuts = Box.even(self.whole, dim, rank, size, packed).cuts
        return Box(self.whole, tuple(sorted((*self.cuts, *cuts))))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        shape = list(self.whole)
        for dim, ranges in self.cuts:
            shape[dim] = sum(stop - start for start, stop in ranges)
        return tuple(shape)

    def take(self, whole: Any) -> Any:
        """Return the part of ``whole``, a tensor or array of that shape: a view if each dimension
        has one range, else a new tensor.
        """
        for dim, ranges in self.cuts:
            before = (slice(None),) * dim
            if len(ranges) == 1:
                whole = whole[(*before, slice(*ranges[0]))]
            else:
                whole = whole[(*before, [at for cut in ranges for at in range(*cut)])]
        return whole

    def runs(self, start: int, stop: int) -> Iterator[BoxRun]:
        """Yield the runs of elements ``[start, stop)`` of the flattened part, in its order."""
        shape, lead = self.shape, self._lead
        row_numel = math.prod(shape[lead:])
        for row in _rows(start, stop, row_numel):
            index = [
                _spread(self._ranges[dim], at) for dim, at in enumerate(_index(row, shape[:lead]))
            ]
            yield from self._row(row, _place(index, self.whole), start, stop, of_whole=False)

    def runs_within(self, start: int, stop: int) -> Iterator[BoxRun]:
        """Yield the contiguous runs of the part inside elements ``[start, stop)`` of the flattened
        whole tensor, in order.
        """
        shape, lead = self.shape, self._lead
        row_numel = math.prod(self.whole[lead:])
        for row in _rows(start, stop, row_numel):
            index = [
                _joined_at(self._ranges[dim], at)
                for dim, at in enumerate(_index(row, self.whole[:lead]))
            ]
            if None not in index:
                at_row = _place([at for at in index if at is not None], shape)
                yield from self._row(at_row, row, start, stop, of_whole=True)

    @cached_property
    def _lead(self) -> int:
        """Index of the last cut dimension: a row has one index along each dimension before it."""
        return max((dim for dim, _ in self.cuts), default=0)

    @cached_property
    def _ranges(self) -> tuple[tuple[Cut, ...], ...]:
        by_dim = dict(self.cuts)
        return tuple(by_dim.get(dim, ((0, n),)) for dim, n in enumerate(self.whole))

    def _row(
        self, at_row: int, row: int, start: int, stop: int, of_whole: bool
    ) -> Iterator[BoxRun]:
        """Yield the runs of row ``at_row`` of the part, ``row`` of the whole tensor, inside
        ``[start, stop)`` of the whole (``of_whole``) or of the part.
        """
        lead = self._lead
        inner = math.prod(self.whole[lead + 1 :])
        at, begin = at_row * math.prod(self.shape[lead:]), row * math.prod(self.whole[lead:])
        for first, last in self._ranges[lead] if self.whole else ((0, 1),):
            run = BoxRun(at, begin + first * inner, (last - first) * inner)
            at += run.length
            base = run.place if of_whole else run.at
            skip, end = max(start - base, 0), min(stop - base, run.length)
            if skip < end:
                yield BoxRun(run.at + skip, run.place + skip, end - skip)

    def meets(self, other: Box) -> bool:
        """Return whether two parts of one tensor have an element in common."""
        return all(
            any(max(a, c) < min(b, d) for a, b in mine for c, d in theirs)
            for mine, theirs in zip(self._ranges, other._ranges)
        )

    def to_json(self) -> JsonObject:
        return {
            "whole": list(self.whole),
            "cuts": [[d, [list(c) for c in r]] for d, r in self.cuts],
        }

    @classmethod
    def from_json(cls, data: JsonObject) -> Box:
        """Inverse of :meth:`to_json`. Raises ValueError if the data is damaged."""
        try:
            cuts = tuple(
                (int(dim), tuple((int(start), int(stop)) for start, stop in ranges))
                for dim, ranges in data["cuts"]
            )
            return cls(tuple(int(n) for n in data["whole"]), cuts)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"a box holds the whole shape and the cuts of its dimensions: {error!r}"
            ) from None


def _rows(start: int, stop: int, numel: int) -> range:
    """Return the rows of ``numel`` elements that overlap ``[start, stop)``."""
    return range(start // numel, -(-stop // numel)) if numel and start < stop else range(0)


def _index(row: int, shape: Sequence[int]) -> list[int]:
    indices = []
    for n in reversed(shape):
        row, at = divmod(row, n)
        indices.append(at)
    return indices[::-1]


def _place(index: Sequence[int], shape: Sequence[int]) -> int:
    position = 0
    for at, n in zip(index, shape):
        position = position * n + at
    return position


def _spread(ranges: Sequence[Cut], at: int) -> int:
    """Return the index in the dimension of element ``at`` of the concatenated ``ranges``."""
    for start, stop in ranges:
        if at < stop - start:
            return start + at
        at -= stop - start
    raise IndexError(f"{at} beyond {ranges}; count from 0")


def _joined_at(ranges: Sequence[Cut], index: int) -> int | None:
    """Inverse of :func:`_spread`; None for an index outside all ranges."""
    at = 0
    for start, stop in ranges:
        if start <= index < stop:
            return at + index - start
        at += stop - start
    return None
