"""Cross-entropy and its gradient over rows of logits, in place; see
hf_zero/ops/model_reference.py for the formula.

Grid: one program a row. Tile: BLOCK columns, 16 bytes a thread and load. First pass: each lane
keeps a running maximum and a running sum (Milakov & Gimelshein 2018,
https://arxiv.org/abs/1805.02867), with one exponential an element, whichever of the two is larger;
one reduction a row. Meanwhile the next two blocks are loaded into shared memory: 32 kB a
multiprocessor in bf16, where latency times bandwidth is about 25 kB and one block would be 16.
Second pass: backwards over the row, whose end is still in L2 (a row of 128,256 bf16 is 256 kB, 132
of them 34 MB), writing the gradient over the logits.

Bytes an element of w bytes: 2w with the gradient if the second read hits L2 (else 3w), w without.
FLOPs: about 12, two of them exponentials: at 4.2 TB/s and bf16 the exponentials take 0.6 of the
memory's time. Registers: 8 columns a thread in fp32 with maximum and sum, below 64 with 32 warps,
one program an SM. With 16 columns they spill, and with smoothing so does the pipeline.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _capped(x, softcap, SOFTCAP: tl.constexpr):
    """Return softcap · tanh(x / softcap), or x."""
    if SOFTCAP:
        return softcap * (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0)
    else:
        return x


@triton.jit
def cross_entropy_kernel(
    logits,
    labels,
    factors,
    losses,
    lses,
    stride,
    width,
    vocabulary,
    ignore_index,
    label_smoothing,
    softcap,
    scale,
    GRADIENT: tl.constexpr,
    FACTOR_A_ROW: tl.constexpr,
    KNOWN: tl.constexpr,
    SMOOTHED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    # ``width`` ≥ vocabulary bounds the accesses: it is a multiple of 16, so that they stay wide;
    # columns beyond the vocabulary are padding.
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    label = tl.load(labels + row)
    lanes = tl.arange(0, BLOCK)
    blocks = tl.cdiv(width, BLOCK)
    if label == ignore_index:
        tl.store(losses + row, 0.0)
        if not KNOWN:
            tl.store(lses + row, 0.0)
        if GRADIENT:
            for block in range(0, blocks):
                columns = block * BLOCK + lanes
                tl.store(
                    start + columns,
                    tl.zeros([BLOCK], logits.dtype.element_ty),
                    mask=columns < width,
                )
    else:
        # A label outside the vocabulary makes the loss NaN: a GPU kernel cannot raise in time.
        target = (
            tl.load(start + label, mask=(label >= 0) & (label < vocabulary), other=float("nan")).to(
                tl.float32
            )
            * scale
        )
        target = _capped(target, softcap, SOFTCAP)
        if KNOWN:
            lse = tl.load(lses + row)
            largest = lse
            log_total = 0.0
        else:
            maximum = tl.full([BLOCK], -1.0e38, tl.float32)
            total = tl.zeros([BLOCK], tl.float32)
            if SMOOTHED:
                plain = tl.zeros([BLOCK], tl.float32)
            for block in tl.range(0, blocks, num_stages=STAGES):
                columns = block * BLOCK + lanes
                x = tl.load(start + columns, mask=columns < width, other=0.0).to(tl.float32) * scale
                y = tl.where(columns < vocabulary, _capped(x, softcap, SOFTCAP), float("-inf"))
                # One of the two terms has exponent 0, so one exponential serves both.
                above = y > maximum
                small = tl.exp2(-tl.abs(y - maximum) * LOG2E)
                total = tl.where(above, total * small + 1.0, total + small)
                maximum = tl.where(above, y, maximum)
                if SMOOTHED:
                    plain += tl.where(columns < vocabulary, y, 0.0)
            largest = tl.max(maximum, axis=0)
            log_total = tl.log(tl.sum(total * tl.exp2((maximum - largest) * LOG2E), axis=0))
            lse = largest + log_total
            tl.store(lses + row, lse)
            # Subtract the largest logit first: its difference to others is exact, but the logsumexp
            # is rounded.
            loss = (largest - target) + log_total
            if SMOOTHED:  # 0 times a target of -inf would be NaN
                loss += label_smoothing * (target - tl.sum(plain, axis=0) / vocabulary)
            tl.store(losses + row, loss)
        if GRADIENT:
            factor = scale
            if FACTOR_A_ROW:
                factor *= tl.load(factors + row)
            else:
                factor *= tl.load(factors)
            hit = (1.0 - label_smoothing) * factor
            spread = label_smoothing / vocabulary * factor
            for block in range(0, blocks):
                columns = (blocks - 1 - block) * BLOCK + lanes
                x = tl.load(start + columns, mask=columns < width, other=0.0).to(tl.float32) * scale
                y = _capped(x, softcap, SOFTCAP)
                grad = tl.exp2((y - largest) * LOG2E - log_total * LOG2E) * factor - spread
                grad = tl.where(columns == label, grad - hit, grad)
                if SOFTCAP:
                    grad *= 1.0 - (y / softcap) * (y / softcap)
                tl.store(start + columns, grad.to(logits.dtype.element_ty), mask=columns < width)


def tile(width: int) -> tuple[int, int]:
    """Return columns a block and warps a program: one block if the row is short, 8 columns a
    thread, which with 32 warps leaves 64 registers each.
    """
    block = min(triton.next_power_of_2(max(width, 1024)), 8192)
    return block, block // 256


def stages(smoothed: bool) -> int:
    """Return the pipeline depth of the first pass: blocks computed on or being loaded."""
    return 1 if smoothed else 3


def cross_entropy_(
    logits: torch.Tensor,
    vocabulary: int,
    labels: torch.Tensor,
    factors: torch.Tensor | None,
    lse: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel over ``logits`` [rows, width], with contiguous rows; see the reference for
    the arguments.
    """
    rows, width = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    lses = torch.empty_like(losses) if lse is None else lse
    if rows:
        block, warps = tile(width)
        cross_entropy_kernel[(rows,)](
            logits,
            labels,
            losses if factors is None else factors,
            losses,
            lses,
            logits.stride(0),
            width,
            vocabulary,
            ignore_index,
            label_smoothing,
            softcap,
            scale,
            GRADIENT=factors is not None,
            FACTOR_A_ROW=factors is not None and factors.numel() > 1,
            KNOWN=lse is not None,
            SMOOTHED=label_smoothing > 0,
            SOFTCAP=softcap > 0,
            BLOCK=block,
            STAGES=stages(label_smoothing > 0),
            num_warps=warps,
        )
    return losses, lses
