"""The two passes of LAMB over a list of tensors, one launch each, driven by a table of tiles with
their addresses.

Roofline. Bound by memory: the first pass reads gradient, master and two moments and writes the
moments, 24 bytes an element, the second reads master and moments and writes the master, 16; about
20 and 10 fp32 operations. Each program reads 64 bytes of the table for ``TILE`` elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_zero.ops.lamb import COLUMNS, TILE, tile_table

# 4 elements a thread: one 16-byte access of each array
BLOCK, WARPS = 512, 4

_COLUMNS = tl.constexpr(COLUMNS)


@triton.jit
def _update(m, v, w, eps, decay, EPS_INSIDE: tl.constexpr):
    if EPS_INSIDE:
        below = tl.sqrt_rn(v + eps)
    else:
        below = tl.sqrt_rn(v) + eps
    return tl.div_rn(m, below) + w * decay


@triton.jit
def _measure_block(
    w,
    g,
    m,
    v,
    at,
    length,
    weights,
    updates,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    decay,
    divisor,
    EPS_INSIDE: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = at + tl.arange(0, BLOCK)
    mask = None if WHOLE else lane < length
    other = None if WHOLE else 0.0
    weight = tl.load(w + lane, mask=mask, other=other)
    grad = tl.load(g + lane, mask=mask, other=other, eviction_policy="evict_first")
    grad = tl.div_rn(grad, divisor)
    mean = tl.load(m + lane, mask=mask, other=other)
    square = tl.load(v + lane, mask=mask, other=other)
    mean = tl.fma(grad, rest1, mean * beta1)
    square = tl.fma(grad * rest2, grad, square * beta2)
    tl.store(m + lane, mean, mask=mask)
    tl.store(v + lane, square, mask=mask)
    update = _update(mean, square, weight, eps, decay, EPS_INSIDE)
    if not WHOLE:  # 0 / 0 beyond the end, with eps 0
        update = tl.where(lane < length, update, 0.0)
    return tl.fma(weight, weight, weights), tl.fma(update, update, updates)


# Grid: one program a tile of at most TILE elements, BLOCK of them in registers at a time.
@triton.jit
def lamb_measure_kernel(
    table,
    partials,
    tiles,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    decay,
    divisor,
    EPS_INSIDE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    entry = table + program * _COLUMNS
    w = tl.load(entry).to(tl.pointer_type(tl.float32))
    g = tl.load(entry + 1).to(tl.pointer_type(tl.float32))
    m = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
    v = tl.load(entry + 3).to(tl.pointer_type(tl.float32))
    length = tl.load(entry + 4).to(tl.int32)
    whole = tl.load(entry + 6)
    weights = tl.zeros([BLOCK], dtype=tl.float32)
    updates = tl.zeros([BLOCK], dtype=tl.float32)
    if whole != 0:
        aw, ag = tl.multiple_of(w, 16), tl.multiple_of(g, 16)
        am, av = tl.multiple_of(m, 16), tl.multiple_of(v, 16)
        for at in tl.range(0, TILE, BLOCK):
            weights, updates = _measure_block(
                aw,
                ag,
                am,
                av,
                at,
                length,
                weights,
                updates,
                beta1,
                rest1,
                beta2,
                rest2,
                eps,
                decay,
                divisor,
                EPS_INSIDE,
                True,
                BLOCK,
            )
    else:
        for at in range(0, length, BLOCK):
            weights, updates = _measure_block(
                w,
                g,
                m,
                v,
                at,
                length,
                weights,
                updates,
                beta1,
                rest1,
                beta2,
                rest2,
                eps,
                decay,
                divisor,
                EPS_INSIDE,
                False,
                BLOCK,
            )
    tl.store(partials + program, tl.sum(weights).to(tl.float64))
    tl.store(partials + tiles + program, tl.sum(updates).to(tl.float64))


@triton.jit
def _apply_block(
    w,
    m,
    v,
    at,
    length,
    step_size,
    eps,
    decay,
    EPS_INSIDE: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = at + tl.arange(0, BLOCK)
    mask = None if WHOLE else lane < length
    other = None if WHOLE else 0.0
    weight = tl.load(w + lane, mask=mask, other=other)
    mean = tl.load(m + lane, mask=mask, other=other)
    square = tl.load(v + lane, mask=mask, other=other)
    update = _update(mean, square, weight, eps, decay, EPS_INSIDE)
    tl.store(w + lane, weight - update * step_size, mask=mask)


# Grid: as in the first pass.
@triton.jit
def lamb_apply_kernel(
    table,
    step_sizes,
    eps,
    decay,
    EPS_INSIDE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = table + tl.program_id(0).to(tl.int64) * _COLUMNS
    w = tl.load(entry).to(tl.pointer_type(tl.float32))
    m = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
    v = tl.load(entry + 3).to(tl.pointer_type(tl.float32))
    length = tl.load(entry + 4).to(tl.int32)
    step_size = tl.load(step_sizes + tl.load(entry + 5))
    whole = tl.load(entry + 6)
    if whole != 0:
        aw, am, av = tl.multiple_of(w, 16), tl.multiple_of(m, 16), tl.multiple_of(v, 16)
        for at in tl.range(0, TILE, BLOCK):
            _apply_block(aw, am, av, at, length, step_size, eps, decay, EPS_INSIDE, True, BLOCK)
    else:
        for at in range(0, length, BLOCK):
            _apply_block(w, m, v, at, length, step_size, eps, decay, EPS_INSIDE, False, BLOCK)


def measure(
    weights: list[Tensor],
    grads: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    eps_inside: bool,
    divisor: float,
) -> tuple[Tensor, Tensor]:
    """Run the first pass. Return the partial sums of squares of the tiles, float64 [2 * tiles]: of
    weights, then of updates; and the bounds of the tiles of each tensor.
    """
    table, bounds = tile_table(weights, grads, means, squares)
    tiles = table.shape[0]
    partials = torch.empty(2 * tiles, dtype=torch.float64, device=table.device)
    if tiles:
        lamb_measure_kernel[(tiles,)](
            table,
            partials,
            tiles,
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            eps,
            decay,
            divisor,
            eps_inside,
            TILE,
            BLOCK,
            num_warps=WARPS,
        )
    return partials, bounds


def apply(
    weights: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    step_sizes: Tensor,
    eps: float,
    decay: float,
    eps_inside: bool,
) -> None:
    """Run the second pass, with a step size of each tensor, which includes its trust ratio."""
    table, _ = tile_table(weights, weights, means, squares)
    if table.shape[0]:
        lamb_apply_kernel[(table.shape[0],)](
            table, step_sizes, eps, decay, eps_inside, TILE, BLOCK, num_warps=WARPS
        )
