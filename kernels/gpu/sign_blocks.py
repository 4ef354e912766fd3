"""Sign blocks: what a rank sends, what the owner of a chunk makes of it, and the update, one pass
each.

Roofline. Bound by memory: compressing reads a gradient (2 or 4 bytes) and an error (4) and writes
the error; combining reads a bit of each rank and reads and writes an average (8); the update reads
and writes a weight (8) and reads an exponent (1). About 12 operations an element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # elements that a program takes: several blocks
WARPS = 8


# Elements ``at`` of a row: fp32, the scale of the block or minus the scale.
@triton.jit
def _signs(bits, scales, at, inside, BLOCK: tl.constexpr):
    byte = tl.load(bits + at // 8, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + at // BLOCK, mask=inside, other=0.0)
    return tl.where((byte >> (at % 8).to(tl.int32)) & 1 == 1, scale, -scale)


# Stores the message of ``wanted`` [blocks, elements]; what it says.
@triton.jit
def _send(bits, scales, wanted, at, here, inside, chunk, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    count = tl.maximum(tl.sum(inside.to(tl.float32), 1), 1.0)
    root = tl.sqrt_rn(tl.div_rn(tl.sum(wanted * wanted, 1), count))
    scale = tl.minimum(root, 2.0 * tl.div_rn(tl.sum(tl.abs(wanted), 1), count))
    block = tl.min(at, 1) // BLOCK
    tl.store(scales + block, scale, mask=block * BLOCK < chunk)
    positive = (wanted >= 0.0).to(tl.int32)
    eights = tl.reshape(positive, [BLOCKS * BLOCK // 8, 8])
    byte = tl.sum(eights << tl.arange(0, 8)[None, :], 1)
    place = tl.min(tl.min(at, 1), 0) // 8 + tl.arange(0, BLOCKS * BLOCK // 8)
    tl.store(bits + place, byte.to(tl.uint8), mask=place * 8 < chunk)
    return tl.where(wanted >= 0.0, scale[:, None], -scale[:, None])


# Grid: tiles of a chunk × rows.
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
    chunk,
    numel,
    stride,
    scales_stride,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    blocks = tl.program_id(0).to(tl.int64) * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    at = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    here = at < chunk
    place = row * chunk + at
    inside = here & (place < numel)
    before = _signs(momentum + row * stride, momentum_scales + row * scales_stride, at, here, BLOCK)
    lost = tl.load(error + place, mask=here, other=0.0)
    new = tl.load(grad + place, mask=here, other=0.0).to(tl.float32) * tl.load(factor)
    wanted = tl.where(inside, (lost + beta * before) + new, 0.0)
    said = _send(
        bits + row * stride,
        scales + row * scales_stride,
        wanted,
        at,
        here,
        inside,
        chunk,
        BLOCK,
        TILE // BLOCK,
    )
    tl.store(error + place, tl.where(inside, wanted - said, 0.0), mask=here)


# Grid: tiles of the chunk.
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
    rows,
    chunk,
    numel,
    stride,
    scales_stride,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    blocks = tl.program_id(0).to(tl.int64) * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    at = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    here = at < chunk
    inside = at < numel
    total = _signs(came, came_scales, at, here, BLOCK)
    for row in range(1, rows):
        place = tl.cast(row, tl.int64)
        total += _signs(came + place * stride, came_scales + place * scales_stride, at, here, BLOCK)
    kept = tl.load(average + at, mask=here, other=0.0)
    kept -= _signs(momentum, momentum_scales, at, here, BLOCK)
    wanted = tl.where(inside, total * share + beta * kept, 0.0)
    said = _send(bits, scales, wanted, at, here, inside, chunk, BLOCK, TILE // BLOCK)
    new = said + (wanted - said) * inverse_beta
    tl.store(average + at, tl.where(inside, new, 0.0), mask=here)


# Grid: tiles of the elements [begin, end); a tile has at most `chunk` of them.
@triton.jit
def apply_kernel(
    weights,
    bits,
    scales,
    exponents,
    keep,
    step,
    chunk,
    begin,
    end,
    stride,
    scales_stride,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    first = begin + tl.program_id(0).to(tl.int64) * TILE
    first_row = first // chunk
    # a tile is no longer than a chunk: it crosses into the next one at most
    at = (first - first_row * chunk).to(tl.int32) + tl.arange(0, TILE)
    place = first + tl.arange(0, TILE)
    inside = place < end
    next_row = at >= chunk
    at = tl.where(next_row, at - chunk, at)
    row = first_row + next_row.to(tl.int64)
    byte = tl.load(bits + row * stride + at // 8, mask=inside, other=0).to(tl.int32)
    size = tl.load(scales + row * scales_stride + at // BLOCK, mask=inside, other=0.0) * step
    size = tl.where((byte >> (at % 8)) & 1 == 1, size, -size)
    exponent = tl.load(exponents + place, mask=inside, other=0).to(tl.int32)
    power = ((508 - exponent) << 21).to(tl.float32, bitcast=True)
    here = tl.load(weights + place, mask=inside, other=0.0)
    tl.store(weights + place, here * keep - size * power, mask=inside)


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
    block: int,
    scales_at: int,
    numel: int,
) -> None:
    rows, stride = out.shape
    chunk = error.numel() // rows
    compress_kernel[(triton.cdiv(chunk, TILE), rows)](
        *_parts(out, scales_at),
        *_parts(momentum, scales_at),
        error,
        grad,
        factor,
        beta,
        chunk,
        numel,
        stride,
        stride // 4,
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
    block: int,
    scales_at: int,
    numel: int,
) -> None:
    rows, stride = came.shape
    chunk = average.numel()
    combine_kernel[(triton.cdiv(chunk, TILE),)](
        *_parts(out, scales_at),
        *_parts(came, scales_at),
        *_parts(momentum, scales_at),
        average,
        beta,
        1.0 / beta,
        1.0 / rows,
        rows,
        chunk,
        numel,
        stride,
        stride // 4,
        block,
        TILE,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


def apply(
    weights: Tensor,
    momentum: Tensor,
    exponents: Tensor,
    keep: float,
    step: float,
    block: int,
    scales_at: int,
    begin: int,
    end: int,
) -> None:
    stride, chunk = momentum.shape[1], weights.numel() // momentum.shape[0]
    tile = min(TILE, 1 << (chunk.bit_length() - 1))
    apply_kernel[(triton.cdiv(end - begin, tile),)](
        weights,
        *_parts(momentum, scales_at),
        exponents,
        keep,
        step,
        chunk,
        begin,
        end,
        stride,
        stride // 4,
        block,
        tile,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
