"""Rotary position embedding of q and k in one launch.

Bound by memory: each element is read and written once, cos and sin of a token once for all its
heads. A program takes one token with all heads of q and k, whose rows of [heads, half of the rotary
width] are adjacent in a projection's output. Few warps, so that a thread holds several heads and
has enough loads in flight.

| kernel | grid | tile | bytes per element (bf16) | FLOP per element | registers |
| --- | --- | --- | --- | --- | --- |
| rotary | batch x sequence | heads x half width, twice | 4 | 3 | 56 |
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

PER_THREAD = 16  # elements of q's half tile that a thread holds


@triton.jit
def _rotate(
    x_ptr,
    out_ptr,
    cos_1,
    sin_1,
    cos_2,
    sin_2,
    x_head,
    out_head,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    HALF_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Rotate one token's heads; x and out point at the token.

    If the tile is no larger than the data, nothing is masked.
    """
    head = tl.arange(0, HEAD_TILE)[:, None]
    column = tl.arange(0, HALF_TILE)[None, :]
    inside = (head < HEADS) & (column < HALF)
    # [HEAD_TILE, HALF_TILE]
    first = tl.load(x_ptr + head * x_head + column, mask=inside, other=0).to(tl.float32)
    second = tl.load(x_ptr + head * x_head + HALF + column, mask=inside, other=0).to(tl.float32)
    if BACKWARD:
        new_first = first * cos_1 + second * sin_2
        new_second = second * cos_2 - first * sin_1
    else:
        new_first = first * cos_1 - second * sin_1
        new_second = second * cos_2 + first * sin_2
    tl.store(out_ptr + head * out_head + column, new_first, mask=inside)
    tl.store(out_ptr + head * out_head + HALF + column, new_second, mask=inside)
    if 2 * HALF < WIDTH:
        rest = 2 * HALF + tl.arange(0, REST_TILE)[None, :]
        inside = (head < HEADS) & (rest < WIDTH)
        # [HEAD_TILE, REST_TILE]
        values = tl.load(x_ptr + head * x_head + rest, mask=inside, other=0)
        tl.store(out_ptr + head * out_head + rest, values, mask=inside)


@triton.jit
def _rotary(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    sequence,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    q_out_batch,
    q_out_head,
    q_out_token,
    k_out_batch,
    k_out_head,
    k_out_token,
    cos_batch,
    cos_token,
    sin_batch,
    sin_token,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    KEY_HEAD_TILE: tl.constexpr,
    HALF_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    batch = (tl.program_id(0) // sequence).to(tl.int64)
    token = (tl.program_id(0) % sequence).to(tl.int64)
    column = tl.arange(0, HALF_TILE)[None, :]
    cos_ptr += batch * cos_batch + token * cos_token
    sin_ptr += batch * sin_batch + token * sin_token
    cos_1 = tl.load(cos_ptr + column, mask=column < HALF, other=0).to(tl.float32)  # [1, HALF_TILE]
    sin_1 = tl.load(sin_ptr + column, mask=column < HALF, other=0).to(tl.float32)
    cos_2 = tl.load(cos_ptr + HALF + column, mask=column < HALF, other=0).to(tl.float32)
    sin_2 = tl.load(sin_ptr + HALF + column, mask=column < HALF, other=0).to(tl.float32)
    q_ptr += batch * q_batch + token * q_token
    k_ptr += batch * k_batch + token * k_token
    q_out_ptr += batch * q_out_batch + token * q_out_token
    k_out_ptr += batch * k_out_batch + token * k_out_token
    _rotate(
        q_ptr,
        q_out_ptr,
        cos_1,
        sin_1,
        cos_2,
        sin_2,
        q_head,
        q_out_head,
        WIDTH,
        HALF,
        HEADS,
        HEAD_TILE,
        HALF_TILE,
        REST_TILE,
        BACKWARD,
    )
    _rotate(
        k_ptr,
        k_out_ptr,
        cos_1,
        sin_1,
        cos_2,
        sin_2,
        k_head,
        k_out_head,
        WIDTH,
        HALF,
        KEY_HEADS,
        KEY_HEAD_TILE,
        HALF_TILE,
        REST_TILE,
        BACKWARD,
    )


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backward: bool, q_out: Tensor, k_out: Tensor
) -> None:
    batch, heads, sequence, width = q.shape
    half = cos.shape[2] // 2
    q, k = _near(q), _near(k)
    strides = [stride for x in (q, k, q_out, k_out) for stride in x.stride()[:3]]
    angles = [
        stride for x in (cos, sin) for stride in (x.stride(0) if x.shape[0] > 1 else 0, x.stride(1))
    ]
    _rotary[(batch * sequence,)](
        q,
        k,
        cos,
        sin,
        q_out,
        k_out,
        sequence,
        *strides,
        *angles,
        WIDTH=width,
        HALF=half,
        HEADS=heads,
        KEY_HEADS=k.shape[1],
        BACKWARD=backward,
        **tiles(heads, k.shape[1], width, half),
    )


def _near(x: Tensor) -> Tensor:
    """Return ``x`` [batch, heads, sequence, width] if all heads of a token are within the 32 bits
    of the kernel's offsets; else a copy.
    """
    return x if x.shape[1] * x.stride(1) < 2**31 else x.transpose(1, 2).contiguous().transpose(1, 2)


def tiles(heads: int, key_heads: int, width: int, half: int) -> dict[str, int]:
    """Return powers of two that cover the heads and their columns, and the warps for them."""
    head_tile, half_tile = triton.next_power_of_2(heads), triton.next_power_of_2(half)
    return {
        "HEAD_TILE": head_tile,
        "KEY_HEAD_TILE": triton.next_power_of_2(key_heads),
        "HALF_TILE": half_tile,
        "REST_TILE": triton.next_power_of_2(max(1, width - 2 * half)),
        "num_warps": min(8, max(1, head_tile * half_tile // (32 * PER_THREAD))),
    }
