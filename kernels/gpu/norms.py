"""RMSNorm and LayerNorm over the last dimension, with the preceding sum and dropout; forward and
backward.

All kernels work on rows [rows, WIDTH] in tiles of ROWS × BLOCK, BLOCK the next power of two;
arithmetic is fp32, results are rounded once.

| kernel | grid | bytes moved per element (bf16) | FLOPs per element |
| --- | --- | --- | --- |
| _norm_forward | rows / ROWS | read x 2 (+ residual 2), write y 2 (+ sum 2) | RMS 4, layer 7 |
| _norm_backward | SMs × k | read dy 2, x or sum 2, write dx 2 (+ 2 dropout) | 9 to 13 |
| _norm_add_partials | 2 × WIDTH / 32 | read 4 × programs per column, write 2 to 4 | 1 per partial |

Dropout adds 25 integer operations in the forward. Each program of _norm_backward loops over tiles.
So an H200's 4.2 TB/s bound everything but dropout. _norm_backward sums d_weight and d_bias of its
rows in registers, writes them once at its end, and _norm_add_partials adds them up in a fixed
order: no atomics, the same bits every time.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from hf_zero.device import kinds

PROGRAMS_WHERE_INTERPRETED = 3


@triton.jit
def _kept(seed, row, columns, rate, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Return the mask of the elements of a tile that dropout keeps: [ROWS, BLOCK].

    One draw of Philox serves four rows (hf_zero/ops/philox.py: kept_rows).
    """
    fours = (row // 4 + tl.arange(0, ROWS // 4)).to(tl.int64)
    # each [ROWS // 4, BLOCK]
    first, second, third, fourth = tl.randint4x(
        tl.load(seed), fours[:, None] * WIDTH + columns[None, :]
    )
    # [ROWS // 4, BLOCK, 2, 2]: the last axes are the row's bits, the low one last. One thread has
    # all four rows of a column, so no data moves.
    words = tl.join(tl.join(first, third), tl.join(second, fourth))
    words = tl.reshape(tl.permute(words, (0, 2, 3, 1)), (ROWS, BLOCK))
    return words.to(tl.uint32, bitcast=True) >= (
        tl.full((1, 1), rate, tl.float32) * 4294967296.0
    ).to(tl.uint32)


@triton.jit
def _norm_forward(
    x,
    residual,
    weight,
    bias,
    seed,
    y,
    total,
    mean,
    rstd,
    rows,
    x_stride,
    residual_stride,
    eps,
    rate,
    OFFSET: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    KEEP_TOTAL: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    row = (first + tl.arange(0, ROWS)).to(tl.int64)  # [ROWS]
    columns = tl.arange(0, BLOCK)  # [BLOCK]
    inside = (row < rows)[:, None] & (columns < WIDTH)[None, :]
    values = tl.load(x + row[:, None] * x_stride + columns[None, :], mask=inside, other=0.0).to(
        tl.float32
    )
    if DROPOUT:
        kept = _kept(seed, first, columns, rate, ROWS, BLOCK, WIDTH)
        values = tl.where(kept, values * (1.0 / (1.0 - rate)), 0.0)
    if HAS_RESIDUAL:
        values += tl.load(
            residual + row[:, None] * residual_stride + columns[None, :], mask=inside, other=0.0
        ).to(tl.float32)
    # The norm is of the rounded sum, so that the backward, which reads that, is the exact
    # derivative.
    at = row[:, None] * WIDTH + columns[None, :]
    values = values.to(y.dtype.element_ty)
    if KEEP_TOTAL:
        tl.store(total + at, values, mask=inside)
    values = values.to(tl.float32)
    if CENTERED:
        means = tl.sum(values, axis=1) / WIDTH  # [ROWS]
        tl.store(mean + row, means, mask=row < rows)
        values = tl.where(columns[None, :] < WIDTH, values - means[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / WIDTH + eps)  # [ROWS]
    tl.store(rstd + row, scale, mask=row < rows)
    weights = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32) + OFFSET
    result = values * scale[:, None] * weights[None, :]
    if HAS_BIAS:
        result += tl.load(bias + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)[None, :]
    tl.store(y + at, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(
    dy,
    saved,
    weight,
    mean,
    rstd,
    seed,
    d_total,
    dx,
    partials,
    rows,
    dy_stride,
    saved_stride,
    rate,
    OFFSET: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr,
    COLUMNS_APART: tl.constexpr,
    RELOAD: tl.constexpr,
    STAGES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)  # [BLOCK]
    if not RELOAD:
        weights = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32) + OFFSET
    if COLUMNS_APART:
        d_weight = tl.zeros((BLOCK,), dtype=tl.float32)
        d_bias = tl.zeros((BLOCK,), dtype=tl.float32)
    else:
        d_weight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        d_bias = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for first in tl.range(
        tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES
    ):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)  # [ROWS]
        inside = (row < rows)[:, None] & (columns < WIDTH)[None, :]
        at = row[:, None] * WIDTH + columns[None, :]
        normed = tl.load(
            saved + row[:, None] * saved_stride + columns[None, :], mask=inside, other=0.0
        ).to(tl.float32)
        incoming = tl.load(
            dy + row[:, None] * dy_stride + columns[None, :], mask=inside, other=0.0
        ).to(tl.float32)
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)  # [ROWS]
        if RELOAD:
            weights = (
                tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32) + OFFSET
            )
        if CENTERED:
            normed -= tl.load(mean + row, mask=row < rows, other=0.0)[:, None]
        normed *= scale[:, None]
        if WEIGHT_GRAD:
            if COLUMNS_APART:
                d_weight += tl.sum(incoming * normed, axis=0)
            else:
                d_weight += incoming * normed
            if HAS_BIAS:
                if COLUMNS_APART:
                    d_bias += tl.sum(incoming, axis=0)
                else:
                    d_bias += incoming
        incoming *= weights[None, :]
        if CENTERED:  # before the other sum: with dropout rows of 4096 spill registers otherwise
            centre = (tl.sum(incoming, axis=1) / WIDTH)[:, None]
        result = incoming - normed * (tl.sum(incoming * normed, axis=1) / WIDTH)[:, None]
        if CENTERED:
            result -= centre
        result *= scale[:, None]
        tl.store(d_total + at, result.to(d_total.dtype.element_ty), mask=inside)
        if DROPOUT:
            kept = _kept(seed, first, columns, rate, ROWS, BLOCK, WIDTH)
            result = tl.where(kept, result * (1.0 / (1.0 - rate)), 0.0)
            tl.store(dx + at, result.to(dx.dtype.element_ty), mask=inside)
    if WEIGHT_GRAD:
        mine = partials + tl.program_id(0).to(tl.int64) * WIDTH + columns
        if not COLUMNS_APART:
            d_weight = tl.sum(d_weight, axis=0)
            d_bias = tl.sum(d_bias, axis=0)
        tl.store(mine, d_weight, mask=columns < WIDTH)
        if HAS_BIAS:
            tl.store(mine + tl.num_programs(0).to(tl.int64) * WIDTH, d_bias, mask=columns < WIDTH)


@triton.jit
def _norm_add_partials(
    partials,
    d_weight,
    d_bias,
    programs,
    WIDTH: tl.constexpr,
    PROGRAMS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    which = tl.program_id(1)
    source = partials + which.to(tl.int64) * programs * WIDTH
    added = tl.zeros((PROGRAMS, COLUMNS), dtype=tl.float32)
    for first in range(0, programs, PROGRAMS):
        program = first + tl.arange(0, PROGRAMS)
        inside = (program < programs)[:, None] & (columns < WIDTH)[None, :]
        added += tl.load(
            source + program[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0
        )
    result = tl.sum(added, axis=0)
    if which == 0:
        tl.store(d_weight + columns, result.to(d_weight.dtype.element_ty), mask=columns < WIDTH)
    else:
        tl.store(d_bias + columns, result.to(d_bias.dtype.element_ty), mask=columns < WIDTH)


def tile(width: int, *, dropout: bool) -> tuple[int, int, int]:
    """Return ROWS, BLOCK and warps for rows of ``width``: 16 elements a thread, or 32 with dropout,
    which draws for four rows at a time.
    """
    block = max(triton.next_power_of_2(width), 16)
    if dropout:
        return max(4, 4096 // block), block, max(4, block // 256)
    warps = 4 if block <= 2048 else 8 if block <= 4096 else 16
    return max(1, warps * 32 * 16 // block), block, warps


def shaped(block: int, warps: int, *, dropout: bool) -> dict[str, bool | int]:
    """Return the tiling flags of a backward. ``COLUMNS_APART``: each thread has all rows of its 8
    columns and adds them up itself. ``RELOAD``: weights are read again for each tile, because
    registers cannot hold them. ``STAGES``: pipeline depth; with 2, the next tile is loaded into
    shared memory during the computation.
    """
    wide = block > (2048 if dropout else 8192)
    return {"COLUMNS_APART": block >= 8 * 32 * warps, "RELOAD": wide, "STAGES": 1 if wide else 2}


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(kinds.properties(device).multi_processor_count) if kinds.runs_triton(device) else 0


def programs_for(device: torch.device, tiles: int, warps: int, *, dropout: bool) -> int:
    """Return the number of programs that share the tiles of a backward: as many as are resident at
    once (kernels/README.md), so that none waits for a slot.
    """
    on_one = max(1, (8 if dropout else 16) // warps)
    return max(1, min(tiles, on_one * _multiprocessors(device) or PROGRAMS_WHERE_INTERPRETED))


def forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seed: torch.Tensor | None,
    eps: float,
    offset: float,
    dropout: float,
    centered: bool,
    keep_total: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch ``_norm_forward``; hf_zero/ops/model_reference.py documents arguments and results."""
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    width = x.shape[-1]
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    total = torch.empty(x.shape if keep_total else (0,), dtype=dtype, device=x.device)
    rows = x.numel() // width if width else 0
    mean = torch.empty(rows if centered else 0, dtype=torch.float32, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if not rows:
        return y, total, mean, rstd
    flat = as_rows(x)
    added = as_rows(residual) if residual is not None else flat
    per_tile, block, warps = tile(width, dropout=seed is not None)
    _norm_forward[(triton.cdiv(rows, per_tile),)](
        flat,
        added,
        weight.contiguous(),
        bias.contiguous() if bias is not None else weight,
        seed if seed is not None else rstd,
        y,
        total,
        mean,
        rstd,
        rows,
        flat.stride(0),
        added.stride(0),
        eps,
        dropout,
        OFFSET=offset,
        CENTERED=centered,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        DROPOUT=seed is not None,
        KEEP_TOTAL=keep_total,
        WIDTH=width,
        ROWS=per_tile,
        BLOCK=block,
        num_warps=warps,
    )
    return y, total, mean, rstd


def backward(
    dy: torch.Tensor,
    saved: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    seed: torch.Tensor | None,
    offset: float,
    dropout: float,
    centered: bool,
    weight_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch ``_norm_backward`` and ``_norm_add_partials``; hf_zero/ops/model_reference.py
    documents arguments and results.
    """
    width = saved.shape[-1]
    rows = saved.numel() // width if width else 0
    made = torch.empty(saved.shape, dtype=dy.dtype, device=dy.device)
    dropped = torch.empty(
        saved.shape if seed is not None else (0,), dtype=dy.dtype, device=dy.device
    )
    d_weight = torch.empty(
        weight.shape if weight_grad else (0,), dtype=weight.dtype, device=dy.device
    )
    d_bias = torch.empty(
        bias.shape if weight_grad and bias is not None else (0,),
        dtype=(weight if bias is None else bias).dtype,
        device=dy.device,
    )
    if not rows:
        return made, dropped, d_weight.zero_(), d_bias.zero_()
    incoming, kept = as_rows(dy), as_rows(saved)
    per_tile, block, warps = tile(width, dropout=seed is not None)
    programs = programs_for(dy.device, triton.cdiv(rows, per_tile), warps, dropout=seed is not None)
    partials = (
        torch.empty(
            1 if bias is None else 2, programs, width, dtype=torch.float32, device=dy.device
        )
        if weight_grad
        else rstd
    )
    _norm_backward[(programs,)](
        incoming,
        kept,
        weight.contiguous(),
        mean if mean is not None else rstd,
        rstd,
        seed if seed is not None else rstd,
        made,
        dropped,
        partials,
        rows,
        incoming.stride(0),
        kept.stride(0),
        dropout,
        OFFSET=offset,
        CENTERED=centered,
        HAS_BIAS=bias is not None,
        DROPOUT=seed is not None,
        WEIGHT_GRAD=weight_grad,
        **shaped(block, warps, dropout=seed is not None),
        WIDTH=width,
        ROWS=per_tile,
        BLOCK=block,
        num_warps=warps,
    )
    if weight_grad:
        _norm_add_partials[(triton.cdiv(width, 32), 2 if bias is not None else 1)](
            partials, d_weight, d_bias, programs, WIDTH=width, PROGRAMS=128, COLUMNS=32, num_warps=4
        )
    return made, dropped, d_weight, d_bias


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as [rows, width] with adjacent elements in a row; a view if possible."""
    flat = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()
