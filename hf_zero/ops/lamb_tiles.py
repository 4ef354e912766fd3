"""The positions of the tensors of a LAMB step for its kernels: a table of tiles with addresses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from hf_zero.device.pinned import upload

TILE = 4096
# addresses of weights, gradient and two moments; length; the part; whether the tile is whole: TILE
# elements, each array at a multiple of ALIGNED bytes; 0
COLUMNS = 8
ALIGNED = 16


def tile_table(*arrays: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the tiles [tiles, COLUMNS] int64 of lists of fp32 tensors, and the bounds [2 * parts +
    1] of the sums over each part: first one number a tile, then the other one.
    """
    places = tuple(zip(*(tuple(each.data_ptr() for each in of) for of in arrays)))
    lengths = tuple(each.numel() for each in arrays[0])
    return _table(places, lengths, arrays[0][0].device)


@lru_cache(maxsize=64)
def _table(
    places: tuple[tuple[int, ...], ...], lengths: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    tables, bounds = [], [0]
    for part, (at, length) in enumerate(zip(places, lengths)):
        starts = torch.arange(0, length, TILE, dtype=torch.int64)
        table = torch.zeros(starts.numel(), COLUMNS, dtype=torch.int64)
        for column, address in enumerate(at):
            table[:, column] = starts * 4 + address
        table[:, 4] = (length - starts).clamp(max=TILE)
        table[:, 5] = part
        table[:, 6] = (table[:, 4] == TILE) & all(address % ALIGNED == 0 for address in at)
        tables.append(table)
        bounds.append(bounds[-1] + starts.numel())
    bounds += [bounds[-1] + bound for bound in bounds[1:]]
    return upload(torch.cat(tables), device), upload(torch.tensor(bounds), device)
