"""Dropout + residual, forward and backward.

Bound by memory, and nearly by instructions: the mask is drawn from the seed in both directions. One
run of Philox gives four words, used for four consecutive rows (hf_zero/ops/philox.py): on sm_90
drawing and dropping then cost 20 instructions per element, but 59 with ``tl.rand`` for each
element, where 4.2 TB/s and 6 bytes leave time for 42 in all. A program therefore holds four rows;
the mask does not depend on its tile.

| kernel | grid | tile | bytes per element (bf16) | FLOP per element | registers |
| --- | --- | --- | --- | --- | --- |
| dropout_add | fours of rows x column blocks | 4 x 1024 | 6 | 2 | 56 |
| dropout_add_backward | fours of rows x column blocks | 4 x 1024 | 4 | 1 | 56 |

Both make 15 integer operations more per element.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# Eight elements of each of the four rows for a thread: an access of 16 bytes in bf16.
TILE = {"BLOCK": 1024, "num_warps": 4}


@triton.jit
def kept_fours(seed_ptr, four, width, column, dropout):
    """Return dropout's masks of four rows, equal to ``philox.kept_rows``. ``four`` and ``column``
    [BLOCK] in int64.

    The words of ``tl.randint4x(seed, four * width + column)``, by 64-bit products: one
    multiplication where Triton has two.
    """
    seed = tl.load(seed_ptr)
    key_0, key_1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    counter = four * width + column
    c0, c1 = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    c2, c3 = c0 * 0, c0 * 0
    for _ in tl.static_range(10):
        product_0, product_1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (product_1 >> 32).to(tl.uint32) ^ c1 ^ key_0, product_1.to(tl.uint32)
        c2, c3 = (product_0 >> 32).to(tl.uint32) ^ c3 ^ key_1, product_0.to(tl.uint32)
        key_0 = tl.add(key_0, 0x9E3779B9, sanitize_overflow=False)
        key_1 = tl.add(key_1, 0xBB67AE85, sanitize_overflow=False)
    least = (tl.full((1,), dropout, tl.float32) * 4294967296.0).to(tl.uint32)
    return c0 >= least, c1 >= least, c2 >= least, c3 >= least


@triton.jit
def _add_row(
    x_ptr,
    residual_ptr,
    out_ptr,
    row,
    rows,
    x_stride,
    residual_stride,
    out_stride,
    column,
    width,
    kept,
    scale,
):
    inside = (row < rows) & (column < width)
    # [BLOCK]
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0).to(tl.float32)
    residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0).to(
        tl.float32
    )
    x = tl.where(kept, x * scale, 0.0)
    tl.store(out_ptr + row * out_stride + column, residual + x, mask=inside)


@triton.jit
def _dropout_add(
    x_ptr,
    residual_ptr,
    seed_ptr,
    out_ptr,
    rows,
    width,
    x_stride,
    residual_stride,
    out_stride,
    dropout,
    scale,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(width, BLOCK)
    pid = tl.program_id(0)
    four = (pid // blocks).to(tl.int64)
    column = (pid % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a, b, c, d = kept_fours(seed_ptr, four, width, column, dropout)
    row = four * 4 + tl.arange(0, 1)  # [1]
    _add_row(
        x_ptr,
        residual_ptr,
        out_ptr,
        row,
        rows,
        x_stride,
        residual_stride,
        out_stride,
        column,
        width,
        a,
        scale,
    )
    _add_row(
        x_ptr,
        residual_ptr,
        out_ptr,
        row + 1,
        rows,
        x_stride,
        residual_stride,
        out_stride,
        column,
        width,
        b,
        scale,
    )
    _add_row(
        x_ptr,
        residual_ptr,
        out_ptr,
        row + 2,
        rows,
        x_stride,
        residual_stride,
        out_stride,
        column,
        width,
        c,
        scale,
    )
    _add_row(
        x_ptr,
        residual_ptr,
        out_ptr,
        row + 3,
        rows,
        x_stride,
        residual_stride,
        out_stride,
        column,
        width,
        d,
        scale,
    )


@triton.jit
def _drop_row(dy_ptr, dx_ptr, row, rows, dy_stride, dx_stride, column, width, kept, scale):
    inside = (row < rows) & (column < width)
    dx = tl.load(dy_ptr + row * dy_stride + column, mask=inside, other=0).to(tl.float32)  # [BLOCK]
    tl.store(dx_ptr + row * dx_stride + column, tl.where(kept, dx * scale, 0.0), mask=inside)


@triton.jit
def _dropout_add_backward(
    dy_ptr, seed_ptr, dx_ptr, rows, width, dy_stride, dx_stride, dropout, scale, BLOCK: tl.constexpr
):
    blocks = tl.cdiv(width, BLOCK)
    pid = tl.program_id(0)
    four = (pid // blocks).to(tl.int64)
    column = (pid % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a, b, c, d = kept_fours(seed_ptr, four, width, column, dropout)
    row = four * 4 + tl.arange(0, 1)  # [1]
    _drop_row(dy_ptr, dx_ptr, row, rows, dy_stride, dx_stride, column, width, a, scale)
    _drop_row(dy_ptr, dx_ptr, row + 1, rows, dy_stride, dx_stride, column, width, b, scale)
    _drop_row(dy_ptr, dx_ptr, row + 2, rows, dy_stride, dx_stride, column, width, c, scale)
    _drop_row(dy_ptr, dx_ptr, row + 3, rows, dy_stride, dx_stride, column, width, d, scale)


def dropout_add(x: Tensor, residual: Tensor, seed: Tensor, dropout: float, out: Tensor) -> None:
    rows, width = x.shape
    _dropout_add[_grid(rows, width)](
        x,
        residual,
        seed,
        out,
        rows,
        width,
        x.stride(0),
        residual.stride(0),
        out.stride(0),
        *_dropout(dropout),
        **TILE,
    )


def dropout_add_backward(dy: Tensor, seed: Tensor, dropout: float, dx: Tensor) -> None:
    rows, width = dy.shape
    _dropout_add_backward[_grid(rows, width)](
        dy, seed, dx, rows, width, dy.stride(0), dx.stride(0), *_dropout(dropout), **TILE
    )


def _grid(rows: int, width: int) -> tuple[int]:
    return (triton.cdiv(rows, 4) * triton.cdiv(width, TILE["BLOCK"]),)


def _dropout(dropout: float) -> tuple[float, float]:
    """Return the probability, below 1 in fp32, and the scale of kept elements."""
    return min(float(dropout), 1 - 2**-24), 1 / (1 - dropout) if dropout < 1 else 0.0
