"""Symmetric blocks: quantize, dequantize, and the sum of several messages, one pass each.

Roofline. Bound by memory: quantizing reads an element (2 or 4 bytes; of a difference two elements)
and writes half a byte or one; the sum over N messages reads N / 2 or N bytes and writes 4. About 10
operations an element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # elements of a program: several blocks
WARPS = 4

# Added to a small number, it leaves the nearest integer, ties to even, in the lower bits.
_TO_INTEGER = tl.constexpr(12582912.0)
_SMALLEST = tl.constexpr(2.0**-90)
_INFINITE = tl.constexpr(0x7F800000)


# Grid: tiles of a row × rows. A program has its tile in registers as [blocks, elements].
@triton.jit
def quantize_kernel(
    codes,
    scales,
    source,
    minus,
    numel,
    stride,
    scales_stride,
    TOP: tl.constexpr,
    HAS_MINUS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * (TILE // BLOCK)
    blocks = first + tl.arange(0, TILE // BLOCK)
    at = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = at < numel
    x = tl.load(source + row * numel + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_MINUS:
        x -= tl.load(minus + row * numel + at, mask=inside, other=0.0).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(bits, 1)  # as integers: NaN > infinity > all numbers
    most = largest.to(tl.float32, bitcast=True)
    finite = largest < _INFINITE
    live = finite & (most >= _SMALLEST)
    magnitude = tl.where(live, most, 1.0)
    top = tl.full([TILE // BLOCK], TOP, tl.float32)
    scale = tl.where(live, tl.div_rn(magnitude, top), tl.where(finite, 0.0, float("nan")))
    half = scale.to(tl.int32, bitcast=True)
    half = (half + 0x7FFF + ((half >> 16) & 1)) >> 16  # to bf16
    tl.store(scales + row * scales_stride + blocks, half.to(tl.int16), mask=blocks * BLOCK < numel)
    one = tl.full([TILE // BLOCK], 1.0, tl.float32)
    inverse = tl.div_rn(one, tl.where(live, (half << 16).to(tl.float32, bitcast=True), 1.0))
    # separate from the product: a fused multiply-add would round only once
    rounded = tl.where(live[:, None], x * inverse[:, None], 0.0) + _TO_INTEGER
    code = rounded.to(tl.int32, bitcast=True)
    if TOP == 7.0:
        low, high = tl.split(tl.reshape(code, [TILE // BLOCK, BLOCK // 2, 2]))
        byte = (low & 15) | ((high & 15) << 4)
        place = blocks[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        tl.store(codes + row * stride + place, byte.to(tl.uint8), mask=2 * place < numel)
    else:
        tl.store(codes + row * stride + at, (code & 255).to(tl.uint8), mask=inside)


# Return the values of a tile of one row: fp32 [TILE].
@triton.jit
def _values(codes, scales, at, inside, FOUR: tl.constexpr, BLOCK: tl.constexpr):
    if FOUR:
        byte = tl.load(codes + at // 2, mask=inside, other=0).to(tl.int32)
        code = (byte << (28 - 4 * (at % 2).to(tl.int32))) >> 28
    else:
        code = (tl.load(codes + at, mask=inside, other=0).to(tl.int32) << 24) >> 24
    half = tl.load(scales + at // BLOCK, mask=inside, other=0).to(tl.int32)
    return code.to(tl.float32) * (half << 16).to(tl.float32, bitcast=True)


# Grid: tiles of a row × rows.
@triton.jit
def dequantize_kernel(
    out,
    codes,
    scales,
    numel,
    stride,
    scales_stride,
    FOUR: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < numel
    value = _values(codes + row * stride, scales + row * scales_stride, at, inside, FOUR, BLOCK)
    if ADD:
        value += tl.load(out + row * numel + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * numel + at, value.to(out.dtype.element_ty), mask=inside)


# Grid: tiles of the sum.
@triton.jit
def dequantize_sum_kernel(
    out,
    codes,
    scales,
    numel,
    stride,
    scales_stride,
    rows,
    FOUR: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < numel
    total = _values(codes, scales, at, inside, FOUR, BLOCK)
    for row in range(1, rows):
        place = tl.cast(row, tl.int64)
        total += _values(
            codes + place * stride, scales + place * scales_stride, at, inside, FOUR, BLOCK
        )
    tl.store(out + at, total, mask=inside)


def _parts(messages: Tensor, scales_at: int) -> tuple[Tensor, Tensor, int, int]:
    """Return codes, scales, and the strides of both between rows, in elements."""
    stride = messages.shape[1]
    whole = messages.view(-1)
    return whole, whole[scales_at:].view(torch.int16), stride, stride // 2


def quantize(
    out: Tensor, source: Tensor, minus: Tensor | None, bits: int, block: int, scales_at: int
) -> None:
    codes, scales, stride, scales_stride = _parts(out, scales_at)
    rows = out.shape[0]
    numel = source.numel() // rows
    quantize_kernel[(triton.cdiv(numel, TILE), rows)](
        codes,
        scales,
        source,
        source if minus is None else minus,
        numel,
        stride,
        scales_stride,
        7.0 if bits == 4 else 127.0,
        minus is not None,
        block,
        TILE,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


def dequantize(
    out: Tensor, messages: Tensor, bits: int, block: int, scales_at: int, add: bool
) -> None:
    codes, scales, stride, scales_stride = _parts(messages, scales_at)
    rows = messages.shape[0]
    numel = out.numel() // rows
    dequantize_kernel[(triton.cdiv(numel, TILE), rows)](
        out,
        codes,
        scales,
        numel,
        stride,
        scales_stride,
        bits == 4,
        add,
        block,
        TILE,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


def dequantize_sum(out: Tensor, messages: Tensor, bits: int, block: int, scales_at: int) -> None:
    codes, scales, stride, scales_stride = _parts(messages, scales_at)
    dequantize_sum_kernel[(triton.cdiv(out.numel(), TILE),)](
        out,
        codes,
        scales,
        out.numel(),
        stride,
        scales_stride,
        messages.shape[0],
        bits == 4,
        block,
        TILE,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
