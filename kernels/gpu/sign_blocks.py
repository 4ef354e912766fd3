"""Sign blocks: a rank's messages, the owner's combination of them for its chunk, and the update,
one pass each.

Roofline. Bound by memory: compressing reads a gradient (2 or 4 bytes) and an error (4) and writes
the error; combining reads a bit of each rank and reads and writes an average (8); the update reads
and writes a weight (8) and reads an exponent (1). About 12 operations an element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # elements of a program: several blocks
WARPS = 8


# Return the first element and the end of each of ``blocks`` in its chunk, multiples of ALIGN;
# ``edges`` are those of the row.
@triton.jit
def _edges_of(edges, blocks, count, ALIGN: tl.constexpr):
    known = blocks < count
    first = tl.load(edges + blocks, mask=known, other=0)
    last = tl.load(edges + blocks + 1, mask=known, other=0)
    return tl.multiple_of(first, ALIGN), tl.multiple_of(last, ALIGN)


# Decode ``blocks`` of a message: fp32 [blocks, elements], the scale or minus the scale.
@triton.jit
def _signs(bits, sizes, blocks, count, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    place = (blocks * (BLOCK // 8))[:, None] + (lane // 8)[None, :]
    byte = tl.load(bits + place, mask=(blocks < count)[:, None], other=0).to(tl.int32)
    return tl.where((byte >> (lane % 8)[None, :]) & 1 == 1, sizes[:, None], -sizes[:, None])


# Store the message of ``wanted`` [blocks, elements]; return its decoded values.
@triton.jit
def _send(bits, scales, wanted, inside, blocks, count, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    numel = tl.maximum(tl.sum(inside.to(tl.float32), 1), 1.0)
    root = tl.sqrt_rn(tl.div_rn(tl.sum(wanted * wanted, 1), numel))
    scale = tl.minimum(root, 2.0 * tl.div_rn(tl.sum(tl.abs(wanted), 1), numel))
    tl.store(scales + blocks, scale, mask=blocks < count)
    positive = (wanted >= 0.0).to(tl.int32)
    eights = tl.reshape(positive, [BLOCKS * BLOCK // 8, 8])
    byte = tl.sum(eights << tl.arange(0, 8)[None, :], 1)
    place = tl.min(blocks, 0) * (BLOCK // 8) + tl.arange(0, BLOCKS * BLOCK // 8)
    tl.store(bits + place, byte.to(tl.uint8), mask=place < count * (BLOCK // 8))
    return tl.where(wanted >= 0.0, scale[:, None], -scale[:, None])


# Grid: tiles of a chunk's blocks × rows.
@triton.jit
def compress_kernel(
    bits,
    scales,
    momentum,
    momentum_scales,
    error,
    grad,
    factor,
    beta,
    edges,
    chunk,
    count,
    stride,
    scales_stride,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    blocks = tl.program_id(0).to(tl.int64) * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    first, last = _edges_of(edges + row * (count + 1), blocks, count, ALIGN)
    at = first[:, None] + tl.arange(0, BLOCK)[None, :]
    inside = at < last[:, None]
    place = row * chunk + at
    sizes = tl.load(momentum_scales + row * scales_stride + blocks, mask=blocks < count, other=0.0)
    before = _signs(momentum + row * stride, sizes, blocks, count, BLOCK)
    lost = tl.load(error + place, mask=inside, other=0.0)
    new = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32) * tl.load(factor)
    wanted = tl.where(inside, (lost + beta * before) + new, 0.0)
    said = _send(
        bits + row * stride,
        scales + row * scales_stride,
        wanted,
        inside,
        blocks,
        count,
        BLOCK,
        TILE // BLOCK,
    )
    tl.store(error + place, wanted - said, mask=inside)


# Grid: tiles of the chunk's blocks.
@triton.jit
def combine_kernel(
    bits,
    scales,
    came,
    came_scales,
    momentum,
    momentum_scales,
    average,
    beta,
    inverse_beta,
    share,
    edges,
    rows,
    count,
    stride,
    scales_stride,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    blocks = tl.program_id(0).to(tl.int64) * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    known = blocks < count
    first, last = _edges_of(edges, blocks, count, ALIGN)
    at = first[:, None] + tl.arange(0, BLOCK)[None, :]
    inside = at < last[:, None]
    sizes = tl.load(came_scales + blocks, mask=known, other=0.0)
    total = _signs(came, sizes, blocks, count, BLOCK)
    for row in range(1, rows):
        place = tl.cast(row, tl.int64)
        sizes = tl.load(came_scales + place * scales_stride + blocks, mask=known, other=0.0)
        total += _signs(came + place * stride, sizes, blocks, count, BLOCK)
    kept = tl.load(average + at, mask=inside, other=0.0)
    sizes = tl.load(momentum_scales + blocks, mask=known, other=0.0)
    kept -= _signs(momentum, sizes, blocks, count, BLOCK)
    wanted = tl.where(inside, total * share + beta * kept, 0.0)
    said = _send(bits, scales, wanted, inside, blocks, count, BLOCK, TILE // BLOCK)
    tl.store(average + at, said + (wanted - said) * inverse_beta, mask=inside)


# Grid: tiles of a chunk's blocks × rows. ``keep`` and ``step``: a number for each block.
@triton.jit
def apply_kernel(
    weights,
    bits,
    scales,
    exponents,
    keep,
    step,
    edges,
    chunk,
    count,
    stride,
    scales_stride,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    blocks = tl.program_id(0).to(tl.int64) * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    known = blocks < count
    first, last = _edges_of(edges + row * (count + 1), blocks, count, ALIGN)
    at = first[:, None] + tl.arange(0, BLOCK)[None, :]
    inside = at < last[:, None]
    place = row * chunk + at
    kept = tl.load(keep + row * count + blocks, mask=known, other=0.0)
    sizes = tl.load(scales + row * scales_stride + blocks, mask=known, other=0.0)
    sizes *= tl.load(step + row * count + blocks, mask=known, other=0.0)
    moved = _signs(bits + row * stride, sizes, blocks, count, BLOCK)
    exponent = tl.load(exponents + place, mask=inside, other=0).to(tl.int32)
    power = ((508 - exponent) << 21).to(tl.float32, bitcast=True)
    here = tl.load(weights + place, mask=inside, other=0.0)
    tl.store(weights + place, here * kept[:, None] - moved * power, mask=inside)


def _parts(messages: Tensor, scales_at: int) -> tuple[Tensor, Tensor]:
    whole = messages.view(-1)
    return whole, whole[scales_at:].view(torch.float32)


def compress(
    out: Tensor,
    momentum: Tensor,
    error: Tensor,
    grad: Tensor,
    beta: float,
    factor: Tensor,
    edges: Tensor,
    align: int,
    block: int,
    scales_at: int,
) -> None:
    rows, stride = out.shape
    count = edges.shape[1] - 1
    compress_kernel[(triton.cdiv(count * block, TILE), rows)](
        *_parts(out, scales_at),
        *_parts(momentum, scales_at),
        error,
        grad,
        factor,
        beta,
        edges,
        error.numel() // rows,
        count,
        stride,
        stride // 4,
        align,
        block,
        TILE,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


def combine(
    out: Tensor,
    came: Tensor,
    momentum: Tensor,
    average: Tensor,
    beta: float,
    edges: Tensor,
    align: int,
    block: int,
    scales_at: int,
) -> None:
    rows, stride = came.shape
    count = edges.shape[1] - 1
    combine_kernel[(triton.cdiv(count * block, TILE),)](
        *_parts(out, scales_at),
        *_parts(came, scales_at),
        *_parts(momentum, scales_at),
        average,
        beta,
        1.0 / beta,
        1.0 / rows,
        edges,
        rows,
        count,
        stride,
        stride // 4,
        align,
        block,
        TILE,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


def apply(
    weights: Tensor,
    momentum: Tensor,
    exponents: Tensor,
    keep: Tensor,
    step: Tensor,
    edges: Tensor,
    align: int,
    block: int,
    scales_at: int,
) -> None:
    rows, stride = momentum.shape
    count = edges.shape[1] - 1
    apply_kernel[(triton.cdiv(count * block, TILE), rows)](
        weights,
        *_parts(momentum, scales_at),
        exponents,
        keep,
        step,
        edges,
        weights.numel() // rows,
        count,
        stride,
        stride // 4,
        align,
        block,
        TILE,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
