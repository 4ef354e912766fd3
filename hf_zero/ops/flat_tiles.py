"""The positions of an update's elements: segments of flat buffers cut into tiles, and the tables of
them that a kernel reads.

A table has one row of :data:`COLUMNS` int64 for each tile: the places of its first element in the
master, the gradient, the moments and the copy, its length, the row of its settings, and whether it
is whole: it has ``tile`` elements and starts at a multiple of :data:`PHASE` in each buffer, so that
16-byte accesses need no masks. Tiles never cross the end of a segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.device.pinned import upload
from hf_zero.errors import KernelError

PHASE = 8  # elements: 16 bytes of the narrowest dtype
COLUMNS = 8
# lr, weight decay, beta1, beta2, eps, log(beta1), log(beta2), sign of the gradient, decoupled
SETTINGS = 9
# sign, keep, l2, beta1, 1 - beta1, beta2, 1 - beta2, step size, 1 / sqrt(1 - beta2^step), eps; then
# zeros
COEFFICIENTS = 16
TILE = 4096


@dataclass(frozen=True)
class FlatRun:
    """``length`` elements of one segment: the index of the first one in each buffer, and the row of
    their settings.

    ``out`` None: there is no copy.
    """

    length: int
    row: int
    master: int
    grad: int
    moment: int
    out: int | None = None

    def joins(self, other: FlatRun) -> bool:
        """Whether ``other`` continues this run in every buffer."""
        return self.row == other.row and all(
            there == here + self.length for here, there in zip(self.places, other.places)
        )

    @property
    def places(self) -> tuple[int, int, int, int]:
        """The places in the master, the gradient, the moments and the copy; without a copy, the
        place in the master is repeated.
        """
        return self.master, self.grad, self.moment, self.master if self.out is None else self.out


@dataclass(frozen=True, eq=False)
class Tiles:
    """The table of an update, [tiles, COLUMNS] int64 on its device, and the sizes that it needs."""

    table: Tensor
    tile: int
    rows: int
    extents: tuple[int, int, int, int]  # least elements of master, gradient, moments and copy

    @classmethod
    def cut(cls, pieces: Iterable[FlatRun], device: torch.device | str, tile: int = TILE) -> Tiles:
        """Cut ``pieces``, which share no element, into tiles. Pieces that continue each other in
        every buffer are joined first.

        Raises KernelError for a tile that is no power of two of at least 16, or a piece that begins
        before its buffer.
        """
        if tile < 16 or tile & (tile - 1):
            raise KernelError(
                f"Tiles: a tile of {tile} elements; give a power of two of at "
                f"least 16, such as {TILE}"
            )
        joined = _joined(pieces)
        for piece in joined:
            if min(piece.length, piece.row, *piece.places) < 0:
                raise KernelError(
                    f"Tiles: {piece} has a negative length, row or place; all of them count from 0"
                )
        tables = [_cut(piece, tile) for piece in joined]
        table = torch.cat(tables) if tables else torch.empty(0, COLUMNS, dtype=torch.int64)
        ends = [tuple(place + piece.length for place in piece.places) for piece in joined]
        extents = tuple(max(places) for places in zip(*ends)) if ends else (0, 0, 0, 0)
        return cls(
            upload(table, device),
            tile,
            max((piece.row + 1 for piece in joined), default=0),
            extents,
        )  # type: ignore[arg-type]

    @property
    def numel(self) -> int:
        """The number of elements in all tiles; waits for the device."""
        return int(self.table[:, 4].sum())


def _joined(pieces: Iterable[FlatRun]) -> Sequence[FlatRun]:
    joined: list[FlatRun] = []
    for piece in pieces:
        if piece.length == 0:
            continue
        if joined and joined[-1].joins(piece):
            last = joined[-1]
            piece = FlatRun(
                last.length + piece.length, last.row, last.master, last.grad, last.moment, last.out
            )
            joined.pop()
        joined.append(piece)
    return joined


def _cut(piece: FlatRun, tile: int) -> Tensor:
    even = len({place % PHASE for place in piece.places}) == 1
    lead = min(-piece.master % PHASE, piece.length) if even else 0
    starts = torch.arange(lead, piece.length, tile, dtype=torch.int64)
    if lead:
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), starts])
    ends = torch.cat([starts[1:], torch.tensor([piece.length])])
    table = torch.zeros(starts.numel(), COLUMNS, dtype=torch.int64)
    for column, place in enumerate(piece.places):
        table[:, column] = starts + place
    table[:, 4] = ends - starts
    table[:, 5] = piece.row
    if even:
        table[:, 6] = (ends - starts == tile) & (starts % PHASE == lead % PHASE)
    return table
