"""Rotary position embedding of q and k, and the copy of v, in one launch.

Bound by memory: each element is read and written once, cos and sin of a token once for all its
heads. A program takes one token with all heads of q, k and v, whose rows of [heads, half of the
rotary width] are adjacent in a projection's output. Few warps, so that a thread holds several heads
and has enough loads in flight.

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
        _copy(
            x_ptr + 2 * HALF,
            out_ptr + 2 * HALF,
            x_head,
            out_head,
            WIDTH - 2 * HALF,
            HEADS,
            HEAD_TILE,
            REST_TILE,
        )


@triton.jit
def _copy(
    x_ptr,
    out_ptr,
    x_head,
    out_head,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    WIDTH_TILE: tl.constexpr,
):
    head = tl.arange(0, HEAD_TILE)[:, None]
    column = tl.arange(0, WIDTH_TILE)[None, :]
    inside = (head < HEADS) & (column < WIDTH)
    # [HEAD_TILE, WIDTH_TILE]
    values = tl.load(x_ptr + head * x_head + column, mask=inside, other=0)
    tl.store(out_ptr + head * out_head + column, values, mask=inside)


@triton.jit
def _rotary(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    v_out_ptr,
    sequence,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    q_out_batch,
    q_out_head,
    q_out_token,
    k_out_batch,
    k_out_head,
    k_out_token,
    v_out_batch,
    v_out_head,
    v_out_token,
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
    WIDTH_TILE: tl.constexpr,
    BACKWARD: tl.constexpr,
    VALUES: tl.constexpr,
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
    if VALUES:
        v_ptr += batch * v_batch + token * v_token
        v_out_ptr += batch * v_out_batch + token * v_out_token
        _copy(v_ptr, v_out_ptr, v_head, v_out_head, WIDTH, KEY_HEADS, KEY_HEAD_TILE, WIDTH_TILE)


def rotary(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    backward: bool,
    q_out: Tensor,
    k_out: Tensor,
    v_out: Tensor | None,
) -> None:
    batch, heads, sequence, width = q.shape
    half = cos.shape[2] // 2
    q, k, v = (None if x is None else _near(x) for x in (q, k, v))
    strides = [
        stride
        for x in (q, k, v, q_out, k_out, v_out)
        for stride in ((0, 0, 0) if x is None else (x.stride(0), x.stride(1), x.stride(2)))
    ]
    angles = [
        stride for x in (cos, sin) for stride in (x.stride(0) if x.shape[0] > 1 else 0, x.stride(1))
    ]
    _rotary[(batch * sequence,)](
        q,
        k,
        v,
        cos,
        sin,
        q_out,
        k_out,
        v_out,
        sequence,
        *strides,
        *angles,
        WIDTH=width,
        HALF=half,
        HEADS=heads,
        KEY_HEADS=k.shape[1],
        BACKWARD=backward,
        VALUES=v is not None,
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
        "WIDTH_TILE": triton.next_power_of_2(width),
        "num_warps": min(8, max(1, head_tile * half_tile // (32 * PER_THREAD))),
    }
