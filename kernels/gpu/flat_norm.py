"""Sums of squares of ranges of one buffer: a first pass that leaves one fp64 for each run, and a
second one over those.

Roofline. Bound by memory: 4 bytes an element of fp32, 2 of 16 bits, 2 operations. The second pass
reads 8 bytes for each run of 16,384.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_zero.ops.flat_tiles import PHASE, RUN, RUN_COLUMNS

BLOCK, WARPS = 4096, 8  # 16 elements a thread: 4 loads of 16 bytes in flight in fp32
PARTIALS, PARTIAL_WARPS = 2048, 8

_RUN, _RUN_COLUMNS, _PHASE = (tl.constexpr(n) for n in (RUN, RUN_COLUMNS, PHASE))


# Grid: one program a run; BLOCK elements in registers at a time, and as many fp32 sums, 64 to 80
# registers.
@triton.jit
def run_squares_kernel(base, table, partials, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    at = tl.load(table + program * _RUN_COLUMNS)
    length = tl.load(table + program * _RUN_COLUMNS + 1).to(tl.int32)
    whole = tl.load(table + program * _RUN_COLUMNS + 2)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    if whole != 0:
        aligned = base + at // _PHASE * _PHASE
        for start in tl.static_range(0, _RUN, BLOCK):
            x = tl.load(aligned + start + lane).to(tl.float32)
            total = tl.fma(x, x, total)
    else:
        for start in range(0, length, BLOCK):
            x = tl.load(base + at + start + lane, mask=start + lane < length, other=0.0).to(
                tl.float32
            )
            total = tl.fma(x, x, total)
    value = tl.sum(total).to(tl.float64)
    # False if squares overflow or may have vanished, and for NaN: sum again in fp64.
    if (value > 1e-30) & (value < 3e38):
        tl.store(partials + program, value)
    else:
        wide = tl.zeros([BLOCK], dtype=tl.float64)
        for start in range(0, length, BLOCK):
            x = tl.load(base + at + start + lane, mask=start + lane < length, other=0.0).to(
                tl.float64
            )
            wide += x * x
        tl.store(partials + program, tl.sum(wide))


# Grid: one program a range.
@triton.jit
def sum_runs_kernel(partials, bounds, out, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    first = tl.load(bounds + program)
    last = tl.load(bounds + program + 1)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float64)
    for start in range(first, last, BLOCK):
        total += tl.load(partials + start + lane, mask=start + lane < last, other=0.0)
    tl.store(out + program, tl.sum(total))


def squares(base: Tensor, runs: Tensor, bounds: Tensor) -> Tensor:
    partials = torch.empty(runs.shape[0], dtype=torch.float64, device=base.device)
    if runs.shape[0]:
        run_squares_kernel[(runs.shape[0],)](base, runs, partials, BLOCK, num_warps=WARPS)
    return sums(partials, bounds)


def sums(partials: Tensor, bounds: Tensor) -> Tensor:
    out = torch.empty(bounds.numel() - 1, dtype=torch.float64, device=bounds.device)
    if out.numel():
        sum_runs_kernel[(out.numel(),)](partials, bounds, out, PARTIALS, num_warps=PARTIAL_WARPS)
    return out
