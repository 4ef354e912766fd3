"""Adam, AdamW and Lion over all segments of a flat buffer in one launch, driven by a table of tiles
with their positions.

Roofline. The update is bound by memory: Adam reads gradient, master and two moments and writes
master and moments, 28 bytes an element with an fp32 gradient (24 + 2 with a 16-bit one, + 2 for a
16-bit copy), with about 20 fp32 operations; Lion 20 bytes and 10. Each program reads 64 bytes of
the table and 40 of coefficients for ``TILE`` elements, 0.1% of the traffic at 4,096.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_zero.ops.flat_tiles import COEFFICIENTS, COLUMNS, SETTINGS

# Elements that a program holds in registers at a time, and its warps: 4 elements a thread are one
# 16-byte access of each fp32 array. STAGES above 1 prefetch blocks through shared memory
# (cp.async), 8 kB a stage.
BLOCK, WARPS, STAGES = 512, 4, 1
# Rows of settings that a program advances: parameters that take their first steps apart have rows
# of their own, and the time of the compiler grows with the rows of a program.
ROWS = 128
# The alignment of places that the compiler may assume. With 8 it would lay out 16-bit arrays in 8
# elements a thread, and the fp32 ones with them, whose stores would then go through shared memory
# three times to be coalesced.
LANE = 4

_COLUMNS, _COEFFICIENTS, _LANE, _SETTINGS = (
    tl.constexpr(n) for n in (COLUMNS, COEFFICIENTS, LANE, SETTINGS)
)


# Grid: one program for ROWS rows. It counts the step, unless it is skipped, and computes in fp64
# the coefficients of its rows.
@triton.jit
def advance_kernel(
    steps, settings, found_inf, out, rows, HAS_FOUND: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    count = tl.load(steps + row, mask=there, other=0.0) + 1.0
    told = settings + row * _SETTINGS
    lr = tl.load(told, mask=there, other=0.0)
    decay = tl.load(told + 1, mask=there, other=0.0)
    beta1 = tl.load(told + 2, mask=there, other=0.0)
    beta2 = tl.load(told + 3, mask=there, other=0.0)
    eps = tl.load(told + 4, mask=there, other=0.0)
    log_beta1 = tl.load(told + 5, mask=there, other=-1.0)
    log_beta2 = tl.load(told + 6, mask=there, other=-1.0)
    sign = tl.load(told + 7, mask=there, other=1.0)
    decoupled = tl.load(told + 8, mask=there, other=0.0)
    wide = count.to(tl.float64)
    step_size = lr / (1.0 - tl.exp(wide * log_beta1))
    root = 1.0 - tl.exp(wide * log_beta2)
    place = out + row * _COEFFICIENTS
    tl.store(place, sign.to(tl.float32), mask=there)
    tl.store(place + 1, (1.0 - lr * decay * decoupled).to(tl.float32), mask=there)
    tl.store(place + 2, (decay * (1.0 - decoupled)).to(tl.float32), mask=there)
    tl.store(place + 3, beta1.to(tl.float32), mask=there)
    tl.store(place + 4, (1.0 - beta1).to(tl.float32), mask=there)
    tl.store(place + 5, beta2.to(tl.float32), mask=there)
    tl.store(place + 6, (1.0 - beta2).to(tl.float32), mask=there)
    tl.store(place + 7, step_size.to(tl.float32), mask=there)
    tl.store(place + 8, (1.0 / tl.sqrt(root)).to(tl.float32), mask=there)
    tl.store(place + 9, eps.to(tl.float32), mask=there)
    tl.store(place + 10, lr.to(tl.float32), mask=there)
    if HAS_FOUND:
        count = tl.where(tl.load(found_inf) != 0.0, count - 1.0, count)
    tl.store(steps + row, count, mask=there)


@triton.jit
def _update_block(
    master,
    grad,
    mean,
    square,
    out,
    at,
    length,
    factor,
    keep,
    l2,
    beta1,
    rest1,
    beta2,
    rest2,
    step_size,
    root_scale,
    eps,
    ADAM: tl.constexpr,
    HAS_OUT: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update ``BLOCK`` elements from ``at`` of a tile on; ``WHOLE``: all of them exist and every
    pointer is aligned.
    """
    lane = at + tl.arange(0, BLOCK)
    mask = None if WHOLE else lane < length
    other = None if WHOLE else 0.0
    g = (
        tl.load(grad + lane, mask=mask, other=other, eviction_policy="evict_first").to(tl.float32)
        * factor
    )
    m = tl.load(mean + lane, mask=mask, other=other, eviction_policy="evict_first")
    w = tl.load(master + lane, mask=mask, other=other, eviction_policy="evict_first")
    g = tl.fma(w, l2, g)
    if ADAM:
        v = tl.load(square + lane, mask=mask, other=other, eviction_policy="evict_first")
        m = tl.fma(g, rest1, m * beta1)
        v = tl.fma(g * rest2, g, v * beta2)
        bound = tl.sqrt_rn(v) * root_scale + eps
        w = w * keep - tl.div_rn(m * step_size, bound)
        tl.store(square + lane, v, mask=mask, eviction_policy="evict_first")
    else:
        way = tl.fma(g, rest1, m * beta1)
        # NaN has no sign, but it must not vanish: it propagates to the weight.
        signed = tl.where(way > 0.0, 1.0, tl.where(way < 0.0, -1.0, way * 0.0))
        w = w * keep - signed * step_size
        m = tl.fma(g, rest2, m * beta2)
    tl.store(mean + lane, m, mask=mask, eviction_policy="evict_first")
    tl.store(master + lane, w, mask=mask, eviction_policy="evict_first")
    if HAS_OUT:
        tl.store(out + lane, w.to(out.dtype.element_ty), mask=mask)


# Grid: one program a tile of at most TILE elements, BLOCK of them in registers at a time (4 a
# thread, 46 to 61 registers with Adam, 32 with Lion). A whole, aligned tile takes 16-byte accesses
# without masks; tiles at the ends of segments are masked.
@triton.jit
def update_kernel(
    master,
    grad,
    mean,
    square,
    out,
    table,
    coefficients,
    divisor,
    found_inf,
    ADAM: tl.constexpr,
    HAS_OUT: tl.constexpr,
    HAS_DIVISOR: tl.constexpr,
    HAS_FOUND: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    entry = table + tl.program_id(0).to(tl.int64) * _COLUMNS
    master_at = tl.load(entry)
    grad_at = tl.load(entry + 1)
    moment_at = tl.load(entry + 2)
    out_at = tl.load(entry + 3)
    length = tl.load(entry + 4).to(tl.int32)
    row = tl.load(entry + 5)
    whole = tl.load(entry + 6)
    if HAS_FOUND:
        skipped = tl.load(found_inf) != 0.0
        whole = tl.where(skipped, 0, whole)
        length = tl.where(skipped, 0, length)
    told = coefficients + row * _COEFFICIENTS
    factor = tl.load(told)
    keep = tl.load(told + 1)
    l2 = tl.load(told + 2)
    beta1 = tl.load(told + 3)
    rest1 = tl.load(told + 4)
    beta2 = tl.load(told + 5)
    rest2 = tl.load(told + 6)
    step_size = tl.load(told + (7 if ADAM else 10))
    root_scale = tl.load(told + 8)
    eps = tl.load(told + 9)
    if HAS_DIVISOR:
        factor = tl.div_rn(factor, tl.load(divisor))
    if whole != 0:
        # Expresses the alignment in a form that the compiler recognizes, for this branch alone.
        master_at = master_at // _LANE * _LANE
        grad_at = grad_at // _LANE * _LANE
        moment_at = moment_at // _LANE * _LANE
        out_at = out_at // _LANE * _LANE
        for at in tl.range(0, TILE, BLOCK, num_stages=STAGES):
            _update_block(
                master + master_at,
                grad + grad_at,
                mean + moment_at,
                square + moment_at,
                out + out_at,
                at,
                length,
                factor,
                keep,
                l2,
                beta1,
                rest1,
                beta2,
                rest2,
                step_size,
                root_scale,
                eps,
                ADAM,
                HAS_OUT,
                True,
                BLOCK,
            )
    else:
        for at in range(0, length, BLOCK):
            _update_block(
                master + master_at,
                grad + grad_at,
                mean + moment_at,
                square + moment_at,
                out + out_at,
                at,
                length,
                factor,
                keep,
                l2,
                beta1,
                rest1,
                beta2,
                rest2,
                step_size,
                root_scale,
                eps,
                ADAM,
                HAS_OUT,
                False,
                BLOCK,
            )


def advance_(steps: Tensor, settings: Tensor, found_inf: Tensor | None) -> Tensor:
    """Count a step in each of ``steps``, unless ``found_inf`` is not 0; return the coefficients of
    the update of each row: [rows, COEFFICIENTS].
    """
    rows = steps.numel()
    out = torch.zeros(rows, COEFFICIENTS, dtype=torch.float32, device=steps.device)
    if rows:
        advance_kernel[(triton.cdiv(rows, ROWS),)](
            steps,
            settings,
            steps if found_inf is None else found_inf,
            out,
            rows,
            found_inf is not None,
            ROWS,
            num_warps=1,
        )
    return out


def adam_(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    out: Tensor | None,
    table: Tensor,
    coefficients: Tensor,
    divisor: Tensor | None,
    found_inf: Tensor | None,
    tile: int,
) -> None:
    _update(
        True, master, grad, exp_avg, exp_avg_sq, out, table, coefficients, divisor, found_inf, tile
    )


def lion_(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    out: Tensor | None,
    table: Tensor,
    coefficients: Tensor,
    divisor: Tensor | None,
    found_inf: Tensor | None,
    tile: int,
) -> None:
    _update(
        False, master, grad, exp_avg, exp_avg, out, table, coefficients, divisor, found_inf, tile
    )


def _update(
    adam: bool,
    master: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    out: Tensor | None,
    table: Tensor,
    coefficients: Tensor,
    divisor: Tensor | None,
    found_inf: Tensor | None,
    tile: int,
) -> None:
    if table.shape[0] == 0:
        return
    update_kernel[(table.shape[0],)](
        master,
        grad,
        mean,
        square,
        master if out is None else out,
        table,
        coefficients,
        coefficients if divisor is None else divisor,
        coefficients if found_inf is None else found_inf,
        adam,
        out is not None,
        divisor is not None,
        found_inf is not None,
        tile,
        min(BLOCK, tile),
        STAGES,
        num_warps=WARPS,
    )
