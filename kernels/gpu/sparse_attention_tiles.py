"""Shared parts of the kernels of block-sparse attention: the mask of a tile's scores, the dropout
mask, and tile settings.

A tile is TILE queries by TILE keys, always 64 × 64: one warpgroup's wgmma is 64 rows, so blocks of
64 waste nothing, and four warps with a small tile leave three to five programs on a multiprocessor,
which hide each other's softmax and loads better than one large tile does.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

TILE = tl.constexpr(64)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# rounds of Philox: the fewest that pass BigCrush (Salmon et al., SC 2011, table 2)
ROUNDS = tl.constexpr(7)
SUM_ROWS = tl.constexpr(16)  # rows of a tile that one program of a sum takes
# arguments that vary with the length: without specialization, a multiple of 16 does not cause a
# compilation of its own
PLANNED = ("programs", "slots")


@dataclass(frozen=True)
class Settings:
    num_warps: int
    num_stages: int


# Head width (a power of two) -> settings. In the backward of keys and values two accumulators of 64
# × width are in registers.
FORWARD = {
    16: Settings(4, 3),
    32: Settings(4, 3),
    64: Settings(4, 3),
    128: Settings(4, 2),
    256: Settings(8, 2),
}
QUERIES = {
    16: Settings(4, 3),
    32: Settings(4, 3),
    64: Settings(4, 3),
    128: Settings(4, 2),
    256: Settings(8, 1),
}
KEYS = {
    16: Settings(4, 2),
    32: Settings(4, 2),
    64: Settings(4, 2),
    128: Settings(8, 2),
    256: Settings(8, 1),
}
# for KEYS alone: Philox needs the registers that two tiles in flight would take
WITH_DROPOUT = Settings(8, 1)


def settings(table, width, dtype, dropout):
    if dtype == torch.float32:  # operands are twice as wide, and each product is three
        return Settings(8 if table is KEYS or width > 64 else 4, 1)
    return WITH_DROPOUT if table is KEYS and dropout else table[width]


def precision(dtype):
    """Return the precision of products: fp32 scores use three TF32 products, about as exact as
    fp32, unless TF32 is allowed for matmuls.

    ``allow_tf32`` cannot be read: torch raises once ``fp32_precision`` has been set, as
    transformers' Trainer does.
    """
    return (
        "tf32"
        if dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision == "tf32"
        else "tf32x3"
    )


def flat(x):
    """Return ``x`` with its last dimension contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def exists(
    rows,
    columns,
    local_rows,
    local_columns,
    bits,
    padding,
    length,
    PARTS: tl.constexpr,
    CAUSAL: tl.constexpr,
    PADDED: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Return the mask of the scores that exist.

    Rows and columns are broadcast against each other, so that either may be the first dimension.
    """
    keep = (rows >= 0) & (columns >= 0)
    if RAGGED:
        keep = keep & (columns < length)
    if CAUSAL:
        keep = keep & (columns <= rows)
    if PADDED:
        keep = keep & (padding != 0)
    if PARTS > 1:
        part = (local_rows // (TILE // PARTS)) * PARTS + local_columns // (TILE // PARTS)
        keep = keep & (((bits >> part) & 1) != 0)
    return keep


@triton.jit
def kept(seed, lane, query_tile, key_tile, threshold):
    """Return the mask of the probabilities of a tile that dropout keeps, [TILE queries, TILE keys];
    the random numbers are those of reference.dropout_words.

    One call of Philox gives the words of four neighboring columns.
    """
    rows = query_tile * TILE + tl.arange(0, TILE)
    fours = key_tile * (TILE // 4) + tl.arange(0, TILE // 4)
    zero = tl.zeros((TILE, TILE // 4), tl.int32)
    w0, w1, w2, w3 = tl.philox(
        seed, zero + rows[:, None], zero + fours[None, :], zero + lane, zero, ROUNDS
    )
    words = tl.reshape(tl.join(tl.join(w0, w1), tl.join(w2, w3)), (TILE, TILE))
    return (words >> 1).to(tl.int32) >= threshold


@triton.jit
def row_lane(item_head, lane, heads, PER_HEAD: tl.constexpr):
    """Return the sequence and head of a program: lanes are sequences if items name heads, else
    sequences × heads.
    """
    if PER_HEAD:
        return lane, item_head
    else:
        return lane // heads, lane % heads
