"""A layout compiled for the kernels: the tiles of 64 × 64 of each program.

Queries and keys are cut into tiles of 64. A row of tiles (one tile of queries) has a list of the
tiles of keys it attends to; a column has the list of rows that attend to it, for the backward of
keys and values. Blocks of more than 64 are several tiles; of blocks below 64 a tile has the union,
and 16 bits with each entry mask the parts of it that are attended to.

Lists are balanced here, once: a list much longer than the mean (a global row or column) is cut into
parts of equal length, each a program of its own that writes its result in fp32 to a slot, to be
combined in a fixed order; and programs are sorted longest first. So a global row costs as much as
its tiles, spread over the device, and no long program is left running alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from hf_zero.errors import KernelError

from .sparsity_config import SparsityConfig, config_of

TILE = 64
SHORTEST_SPLIT = 16  # tiles: a shorter list is not worth a second program and the sum after it
LONGEST = 2  # times the mean: a longer list is cut


@dataclass(frozen=True, eq=False)
class Lists:
    """Programs over rows, or over columns. int32 on the device.

    ``items`` [programs, 8]: tile, start of its list, its length, slot or -1, head, number of the
    part, 0, 0. ``index`` [entries]: tiles of keys; in columns, ``head in the group * tiles + tile``
    of queries. ``bits`` [entries], or [1] unused. ``splits`` [lists cut, 4]: head, tile, first
    slot, parts. ``slots``: results in fp32, for each head (or, ``per_head``, for each sequence).
    """

    items: torch.Tensor
    index: torch.Tensor
    bits: torch.Tensor
    splits: torch.Tensor
    slots: int


@dataclass(frozen=True, eq=False)
class SparsePlan:
    """The plan of a layout. ``layout`` is bool [heads or 1, blocks, blocks]; ``parts`` is the width
    of a tile in blocks, 1 if whole tiles are attended to.
    """

    layout: torch.Tensor
    block: int
    length: int
    tiles: int
    parts: int
    per_head: bool
    rows: Lists
    columns: Lists


@functools.lru_cache(maxsize=256)
def plan_for(
    handle: int, length: int, heads: int, group: int, causal: bool, device: torch.device
) -> SparsePlan:
    """Return the plan of a registered configuration for ``length`` tokens, ``heads`` of queries,
    ``group`` of which share keys and values.
    """
    with torch.device("cpu"):  # tables are made on the host, whatever the default device is
        return _planned(config_of(handle), length, heads, group, causal, device)


def _planned(
    config: SparsityConfig, length: int, heads: int, group: int, causal: bool, device: torch.device
) -> SparsePlan:
    block = config.block
    if block not in (16, 32) and block % TILE:
        raise KernelError(
            f"block is {block}; block-sparse attention takes blocks of 16, 32, 64 or a "
            "multiple of 64 tokens"
        )
    layout = config.make_layout(-(-length // block) * block) != 0
    if (layout == layout[:1]).all():
        layout = layout[:1]
    if layout.shape[0] not in (1, heads):
        raise KernelError(
            f"the layout has {layout.shape[0]} heads that differ, but the queries have {heads}; "
            f"make it with num_heads={heads}"
        )
    if causal:
        layout = layout.tril()
    tiles, bits = _tiled(layout, block, -(-length // TILE), causal)
    count, kv_heads = tiles.shape[1], heads // group
    per_head = tiles.shape[0] > 1

    def by_group(values: torch.Tensor) -> torch.Tensor:
        if per_head:
            return values.view(kv_heads, group, count, count)
        return values[:, None].expand(1, group, count, count)

    columns = by_group(tiles).permute(0, 3, 1, 2).reshape(-1, count, group * count)
    column_bits = None
    if bits is not None:
        column_bits = by_group(bits).permute(0, 3, 1, 2).reshape(-1, count, group * count)
    return SparsePlan(
        layout=layout.to(device),
        block=block,
        length=length,
        tiles=count,
        parts=1 if bits is None else TILE // block,
        per_head=per_head,
        rows=_lists(tiles, bits, device),
        columns=_lists(columns, column_bits, device),
    )


def _tiled(
    layout: torch.Tensor, block: int, count: int, causal: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the tiles attended to, bool [heads, tiles, tiles], and for small blocks the parts of
    each: int32, bit ``row part * parts + column part``.
    """
    if block >= TILE:
        times = block // TILE
        tiles = layout.repeat_interleave(times, 1).repeat_interleave(times, 2)[:, :count, :count]
        return (tiles.tril() if causal else tiles), None
    parts = TILE // block
    heads, blocks = layout.shape[:2]
    padded = layout.new_zeros(heads, count * parts, count * parts)
    padded[:, :blocks, :blocks] = layout
    cut = (
        padded.view(heads, count, parts, count, parts)
        .transpose(2, 3)
        .reshape(heads, count, count, parts * parts)
    )
    bits = (cut.to(torch.int32) << torch.arange(parts * parts, dtype=torch.int32)).sum(
        -1, dtype=torch.int32
    )
    return cut.any(-1), bits


def _lists(tiles: torch.Tensor, bits: torch.Tensor | None, device: torch.device) -> Lists:
    heads, count = tiles.shape[:2]
    entries = tiles.nonzero()  # [entries, 3]: head, row, column, in order
    lengths = tiles.sum(-1).flatten()  # [heads * rows]
    starts = lengths.cumsum(0) - lengths
    longest = max(SHORTEST_SPLIT, LONGEST * -(-int(lengths.sum()) // max(1, lengths.numel())))
    parts = (-(-lengths // longest)).clamp(min=1)
    owner = torch.arange(heads * count).repeat_interleave(parts)
    first_of = parts.cumsum(0) - parts
    part = torch.arange(len(owner)) - first_of[owner]
    step = -(-lengths // parts)
    start = part * step[owner]
    length = torch.minimum(step[owner], lengths[owner] - start).clamp(min=0)
    cut = parts > 1
    slots_before = (parts * cut).cumsum(0) - parts * cut
    slot = torch.where(cut[owner], slots_before[owner] + part, -1)
    zero = torch.zeros_like(owner)
    items = torch.stack(
        [owner % count, starts[owner] + start, length, slot, owner // count, part, zero, zero], 1
    )
    items = items[length.argsort(descending=True, stable=True)]
    splits = torch.stack(
        [
            torch.arange(heads * count) // count,
            torch.arange(heads * count) % count,
            slots_before,
            parts,
        ],
        1,
    )[cut]
    entry_bits = bits[tiles] if bits is not None else torch.zeros(1)

    def put(values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.int32).contiguous().to(device)

    index = entries[:, 2] if len(entries) else torch.zeros(1)
    return Lists(put(items), put(index), put(entry_bits), put(splits), int((parts * cut).sum()))
