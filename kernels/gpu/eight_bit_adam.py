"""Adam and AdamW with moments in dynamic 8-bit blocks: decode, update and encode in one pass.

Roofline. Bound by memory and by operations alike: an element takes 16 bytes with an fp32 gradient
(gradient 4, master 8, codes of two moments 4), 2 less with a 16-bit gradient and 2 more for a
16-bit copy; scales add 1/16 of a byte. About 40 operations update an element, and 80 find its two
codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_zero.ops.dynamic_map import EDGES, LINES, device_tables
from hf_zero.ops.reference import BLOCK, ZERO_CODE

TILE, WARPS = 256, 1  # a block a warp: its largest magnitude is found without a barrier

_SMALLEST = tl.constexpr(2.0**-90)
_INFINITE = tl.constexpr(0x7F800000)
_ZERO_CODE = tl.constexpr(ZERO_CODE)
_EDGES, _LINES = tl.constexpr(EDGES), tl.constexpr(LINES)


# Return the values of a tile of blocks: fp32 [blocks, elements].
@triton.jit
def _decode(codes, scales, table, at, inside, blocks, known):
    code = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + blocks, mask=known, other=0.0)
    return tl.load(table + code) * scale[:, None]


# Store the scales and the nearest codes of ``values`` [blocks, elements]; ``table``: the values of
# the codes, then the edges of the regions, and their lines (slope, shift, largest rank).
@triton.jit
def _encode(codes, scales, table, values, at, inside, blocks, known, SIGNED: tl.constexpr):
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(tl.where(inside, bits, 0), 1)  # as integers: NaN > infinity > all numbers
    most = largest.to(tl.float32, bitcast=True)
    finite = largest < _INFINITE
    live = finite & (most >= _SMALLEST)
    scale = tl.where(live, most, tl.where(finite, 0.0, float("nan")))
    tl.store(scales + blocks, scale, mask=known)
    inverse = tl.div_rn(tl.full(most.shape, 1.0, tl.float32), tl.where(live, most, 1.0))
    part = tl.where(live[:, None] & inside, tl.abs(values) * inverse[:, None], 0.0)
    lines = table + 256 + _EDGES
    region = tl.zeros(part.shape, tl.int32)
    for edge in tl.static_range(_EDGES):
        region += (part > tl.load(table + 256 + edge)).to(tl.int32)
    slope = tl.load(lines + region)
    shift = tl.load(lines + _LINES + region)
    top = tl.load(lines + 2 * _LINES + region)
    code = tl.minimum(part * slope + shift, top).to(tl.int32)
    if SIGNED:
        below = _ZERO_CODE - tl.minimum(code, _ZERO_CODE)
        code = tl.where(live[:, None] & (values < 0.0), below, code + _ZERO_CODE)
    tl.store(codes + at, code.to(tl.uint8), mask=inside)


# Grid: tiles. A program has its tile in registers as [blocks, elements]. NEAR: the first moment is
# computed from its old value, as torch's lerp does for a weight below one half, or from the
# gradient.
@triton.jit
def eight_bit_adam_kernel(
    master,
    grad,
    mean,
    mean_scales,
    square,
    square_scales,
    out,
    mean_table,
    square_table,
    numel,
    divisor,
    keep,
    l2,
    beta1,
    rest1,
    beta2,
    rest2,
    root_scale,
    eps,
    step_size,
    NEAR: tl.constexpr,
    HAS_L2: tl.constexpr,
    HAS_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    blocks = tl.program_id(0).to(tl.int64) * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    at = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = at < numel
    known = blocks * BLOCK < numel
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.div_rn(g, tl.full(g.shape, divisor, tl.float32))
    w = tl.load(master + at, mask=inside, other=0.0) * keep
    if HAS_L2:
        g = g + w * l2
    m = _decode(mean, mean_scales, mean_table, at, inside, blocks, known)
    v = _decode(square, square_scales, square_table, at, inside, blocks, known)
    if NEAR:
        m = m + (g - m) * rest1
    else:
        m = g - (g - m) * beta1
    v = v * beta2 + (g * rest2) * g
    bound = tl.sqrt_rn(v) * root_scale + eps
    w = w + tl.div_rn(m * -step_size, bound)
    tl.store(master + at, w, mask=inside)
    if HAS_OUT:
        tl.store(out + at, w.to(out.dtype.element_ty), mask=inside)
    _encode(mean, mean_scales, mean_table, m, at, inside, blocks, known, True)
    _encode(square, square_scales, square_table, v, at, inside, blocks, known, False)


def adam_(
    master: Tensor,
    grad: Tensor,
    mean: tuple[Tensor, Tensor],
    square: tuple[Tensor, Tensor],
    out: Tensor | None,
    keep: float,
    l2: float,
    beta1: float,
    beta2: float,
    root_scale: float,
    eps: float,
    step_size: float,
    divisor: float,
    negate: bool,
) -> None:
    numel = master.numel()
    if not numel:
        return
    # the branch depends on the weight in fp32, as in the reference
    near = float(torch.tensor(1 - beta1, dtype=torch.float32)) < 0.5
    eight_bit_adam_kernel[(triton.cdiv(numel, TILE),)](
        master,
        grad,
        *mean,
        *square,
        master if out is None else out,
        *device_tables(master.device),
        numel,
        -divisor if negate else divisor,
        keep,
        l2,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        root_scale,
        eps,
        step_size,
        near,
        l2 != 0,
        out is not None,
        BLOCK,
        TILE,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
