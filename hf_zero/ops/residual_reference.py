"""The residual kernels in plain torch: computed in fp32, rounded once; masks from the same Philox
numbers as the kernels'.
"""

from __future__ import annotations

from torch import Tensor

from hf_zero.ops.philox import kept_rows


def dropout_add(
    x: Tensor,
    residual: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    dropout: float,
    out: Tensor,
) -> None:
    """Compute ``out = residual + dropout(x + bias)``; x, residual, out [rows, width], bias [width],
    seed int64 [1] or None (no dropout).
    """
    summed = x.float() if bias is None else x.float() + bias.float()
    out.copy_(residual.float() + dropped(summed, seed, dropout))


def dropout_add_backward(
    dy: Tensor, seed: Tensor | None, dropout: float, dx: Tensor | None, dbias: Tensor | None
) -> None:
    """Compute ``dx = dropout(dy)`` with the mask of the forward, and ``dbias``, its sum over the
    rows; None for gradients that are not wanted.
    """
    grad = dropped(dy.float(), seed, dropout)
    if dx is not None:
        dx.copy_(grad)
    if dbias is not None:
        dbias.copy_(grad.sum(0))


def dropped(values: Tensor, seed: Tensor | None, dropout: float) -> Tensor:
    """Return each fp32 element scaled by 1/(1-p) if kept, else zero."""
    if seed is None:
        return values
    rows, width = values.shape
    kept = kept_rows(seed, rows, width, dropout)
    return values.mul(1 / (1 - dropout) if dropout < 1 else 0.0).masked_fill(~kept, 0)
