"""Weights rounded to the levels of few bits, in place.

Roofline. Bound by memory: 2 or 4 bytes read and as many written an element, 4 more read if noise is
added; about 20 operations, eight of them the division.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE, WARPS = 2048, 4

# Added to a number below 2^22, it leaves the nearest integer, ties to even.
_TO_INTEGER = tl.constexpr(12582912.0)


# Grid: the tiles of all parts, on one axis, because the others hold 65,535 programs. A part of
# ``values`` is between ``lowest`` and ``highest``; for symmetric levels ``highest`` is its largest
# magnitude.
@triton.jit
def round_kernel(
    values,
    lowest,
    highest,
    noise,
    numel,
    levels,
    share,
    SYMMETRIC: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    TILE: tl.constexpr,
):
    tiles = tl.cdiv(numel, TILE)
    part = (tl.program_id(0) // tiles).to(tl.int64)
    at = (tl.program_id(0) % tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside, at = at < numel, part * numel + at
    x = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(highest + part).to(tl.float32)
    if SYMMETRIC:
        low, span = levels * 0.0, high * 2.0
        least, most = -levels * 0.5, levels * 0.5 - 1.0
    else:
        low = tl.load(lowest + part).to(tl.float32)
        span = high - low
        least, most = levels * 0.0, levels - 1.0
    step = span / levels  # division by a power of two: exact
    step = tl.where(step > 0.0, step, 1.0)
    scaled = tl.div_rn(x - low, step + tl.zeros([TILE], tl.float32))
    if STOCHASTIC:
        level = tl.floor(scaled + tl.load(noise + at, mask=inside, other=0.0))
    else:
        level = (scaled + _TO_INTEGER) - _TO_INTEGER
    level = tl.minimum(tl.maximum(level, least), most)
    level = tl.where(scaled == scaled, level, scaled)
    rounded = level * step + low
    # start from the nearer end, as torch.lerp does
    upper = x - (x - rounded) * (1.0 - share)
    mixed = tl.where(share < 0.5, rounded + share * (x - rounded), upper)
    mixed = tl.where(share > 0.0, mixed, rounded)
    tl.store(values + at, mixed.to(values.dtype.element_ty), mask=inside)


def round_(
    values: Tensor,
    lowest: Tensor,
    highest: Tensor,
    bits: int,
    symmetric: bool,
    noise: Tensor | None,
    share: float,
) -> None:
    parts, numel = highest.numel(), values.numel() // highest.numel()
    round_kernel[(triton.cdiv(numel, TILE) * parts,)](
        values,
        lowest,
        highest,
        values if noise is None else noise,
        numel,
        float(2**bits),
        float(share),
        symmetric,
        noise is not None,
        TILE,
        num_warps=WARPS,
    )
