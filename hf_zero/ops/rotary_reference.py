"""The rotary kernels in plain torch: computed in fp32, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, backward: bool, out: Tensor) -> None:
    """Rotate one tensor [batch, heads, sequence, width] by cos, sin [batch or 1, sequence, rotary
    width]; columns beyond are copied.

    ``backward`` applies the transpose, which for cos and sin of equal halves is the rotation by the
    negative angle.
    """
    rotated = cos.shape[-1]
    cos, sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    wide = x[..., :rotated].float()
    turned = turn(wide * sin, True) if backward else turn(wide, False) * sin
    out[..., :rotated] = wide * cos + turned
    out[..., rotated:] = x[..., rotated:]


def turn(x: Tensor, backward: bool) -> Tensor:
    """Return (-second half, first half), or its transpose."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second, -first) if backward else (-second, first), dim=-1)


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
    """Rotate q and k into q_out and k_out, copy v: [batch, heads, sequence, width], each with its
    own number of heads.
    """
    rotate(q, cos, sin, backward, q_out)
    rotate(k, cos, sin, backward, k_out)
    if v is not None and v_out is not None:
        v_out.copy_(v)
