"""Which part of a whole tensor a rank of a tensor- or expert-parallel group holds. Arithmetic
only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Cut = tuple[int, int]


@dataclass(frozen=True)
class Box:
    """A part of a tensor of shape ``whole``: along each dimension of ``cuts`` the given half-open
    ranges, one after another, and all of the others.

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
        """The part of ``rank`` of ``size`` where dimension ``dim`` is cut into equal parts, or each
        of ``packed`` equal blocks of it is.

        Raises ValueError where it cannot be cut evenly.
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

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        shape = list(self.whole)
        for dim, ranges in self.cuts:
            shape[dim] = sum(stop - start for start, stop in ranges)
        return tuple(shape)

    def take(self, whole: Any) -> Any:
        """The part of ``whole``, a tensor or array of that shape: a view where it is one range
        along each dimension, else a new tensor.
        """
        for dim, ranges in self.cuts:
            pieces = [whole.narrow(dim, start, stop - start) for start, stop in ranges]
            whole = pieces[0] if len(pieces) == 1 else _joined(pieces, dim)
        return whole

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Elements ``[start, stop)`` of the part, flattened, as runs ``(at, place, length)``: at
        ``at`` of the part and ``place`` of the whole tensor, flattened.
        """
        for at, place, length in self._runs():
            if at >= stop:
                return
            first, last = max(at, start), min(at + length, stop)
            if first < last:
                yield first, place + first - at, last - first

    def _runs(self) -> Iterator[tuple[int, int, int]]:
        """All runs of the part, in its order."""
        last = max((dim for dim, _ in self.cuts), default=-1)
        if last < 0:
            yield 0, 0, math.prod(self.whole)
            return
        inner = math.prod(self.whole[last + 1 :])
        by_dim = dict(self.cuts)
        outer = [
            itertools.chain.from_iterable(range(*cut) for cut in by_dim.get(dim, ((0, n),)))
            for dim, n in enumerate(self.whole[:last])
        ]
        at = 0
        for index in itertools.product(*outer):
            row = 0
            for n, i in zip(self.whole, index):
                row = row * n + i
            row *= self.whole[last]
            for start, stop in by_dim[last]:
                length = (stop - start) * inner
                yield at, (row + start) * inner, length
                at += length

    def to_json(self) -> dict[str, Any]:
        return {
            "whole": list(self.whole),
            "cuts": [[d, [list(c) for c in r]] for d, r in self.cuts],
        }

    @classmethod
    def from_json(cls, data: Any) -> Box:
        """Inverse of :meth:`to_json`. Raises ValueError where it is damaged."""
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


def _joined(pieces: Sequence[Any], dim: int) -> Any:
    import torch

    return torch.cat(list(pieces), dim)
