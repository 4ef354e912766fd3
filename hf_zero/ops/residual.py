"""Bias, dropout and residual in one pass each way.

Dropout (Srivastava et al., JMLR 2014) draws its mask from a seed (see philox.py) and draws it again
in the backward: neither the mask nor an activation is saved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zero.errors import KernelError
from hf_zero.ops import model_reference as reference
from hf_zero.ops.dispatch import Kernel, as_rows, check_alike, check_bias, check_float
from hf_zero.ops.operators import GradientContext, operator
from hf_zero.ops.philox import draw_seed


def dropout_add(
    x: Tensor,
    residual: Tensor,
    bias: Tensor | None = None,
    *,
    dropout: float = 0.0,
    training: bool = False,
    seed: Tensor | None = None,
) -> Tensor:
    """Return ``residual + dropout(x + bias)``: x's shape, in the wider dtype of x and residual.

    Args:
        x, residual: [..., width], fp32, bf16 or fp16.
        bias: [width] or None.
        dropout: the probability that an element of ``x + bias`` is zeroed; the others are scaled by
            1/(1 - dropout). Only in training.
        seed: int64 [1] on x's device; None: drawn from torch's generator.

    Raises:
        KernelError: a dtype, device or shape does not fit, or dropout is not a probability.
    """
    if seed is not None and (
        seed.dtype != torch.int64 or seed.shape != (1,) or seed.device != x.device
    ):
        raise KernelError(
            f"dropout_add: seed is {seed.dtype} {list(seed.shape)} on {seed.device} and x on "
            f"{x.device}; give int64 [1] on x's device"
        )
    check_float("dropout_add", x=x, residual=residual, bias=bias)
    check_alike("dropout_add", "x", x, "residual", residual)
    check_bias("dropout_add", bias, x)
    if not 0 <= dropout <= 1:
        raise KernelError(
            f"dropout_add: dropout={dropout} is not a probability; give a number between 0 and 1"
        )
    drops = training and dropout > 0
    if not drops and bias is None:
        return residual + x
    if drops and seed is None:
        seed = draw_seed(x.device)
    return _dropout_add(x, residual, bias, seed if drops else None, dropout)


def _ones(device: torch.device, *shape: int) -> Tensor:
    return torch.ones(shape, device=device)


DROPOUT_ADD = Kernel(
    "dropout_add",
    "residual:dropout_add",
    reference.dropout_add,
    example=lambda device: (
        _ones(device, 5, 24),
        _ones(device, 5, 24),
        _ones(device, 24),
        torch.ones(1, dtype=torch.int64, device=device),
        0.5,
        _ones(device, 5, 24),
    ),
)
DROPOUT_ADD_BACKWARD = Kernel(
    "dropout_add_backward",
    "residual:dropout_add_backward",
    reference.dropout_add_backward,
    example=lambda device: (
        _ones(device, 5, 24),
        torch.ones(1, dtype=torch.int64, device=device),
        0.5,
        _ones(device, 5, 24),
        _ones(device, 24),
    ),
)


@operator("hf_zero::dropout_add")
def _dropout_add(
    x: Tensor, residual: Tensor, bias: Tensor | None, seed: Tensor | None, dropout: float
) -> Tensor:
    out = _sum_like(x, residual)
    if x.numel():
        DROPOUT_ADD(
            as_rows(x),
            as_rows(residual),
            bias if bias is None else bias.contiguous(),
            seed,
            dropout,
            as_rows(out),
        )
    return out


@operator("hf_zero::dropout_add_backward")
def _dropout_add_backward(
    dy: Tensor,
    seed: Tensor | None,
    dropout: float,
    x_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Return dx and dbias in their dtypes; gradients that are not wanted (dtype None) are empty."""
    dx, dbias = _gradients(dy, x_dtype, bias_dtype)
    if dy.numel():
        outputs = as_rows(dx) if x_dtype else None, dbias if bias_dtype else None
        DROPOUT_ADD_BACKWARD(as_rows(dy), seed, dropout, *outputs)
    return dx, dbias.zero_() if dy.numel() == 0 else dbias


@_dropout_add.register_fake
def _(
    x: Tensor, residual: Tensor, bias: Tensor | None, seed: Tensor | None, dropout: float
) -> Tensor:
    return _sum_like(x, residual)


@_dropout_add_backward.register_fake
def _(
    dy: Tensor,
    seed: Tensor | None,
    dropout: float,
    x_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    return _gradients(dy, x_dtype, bias_dtype)


def _sum_like(x: Tensor, residual: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))


def _gradients(
    dy: Tensor, x_dtype: torch.dtype | None, bias_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    return (
        dy.new_empty(dy.shape if x_dtype else (0,), dtype=x_dtype),
        dy.new_empty(dy.shape[-1:] if bias_dtype else (0,), dtype=bias_dtype),
    )


def _keep_seed(
    ctx: GradientContext,
    inputs: tuple[Tensor, Tensor, Tensor | None, Tensor | None, float],
    output: Tensor,
) -> None:
    x, residual, bias, seed, ctx.dropout = inputs
    ctx.dtypes = x.dtype, residual.dtype, None if bias is None else bias.dtype
    ctx.save_for_backward(seed)


def _gradient(ctx: GradientContext, dy: Tensor) -> tuple[Tensor | None, ...]:
    (seed,) = ctx.saved_tensors
    x_dtype, residual_dtype, bias_dtype = ctx.dtypes
    x_trains, residual_trains, bias_trains = ctx.needs_input_grad[:3]
    drops_x = x_trains and seed is not None
    dx = dbias = None
    if drops_x or bias_trains:
        dx, dbias = _dropout_add_backward(
            dy, seed, ctx.dropout, x_dtype if drops_x else None, bias_dtype if bias_trains else None
        )
    if not drops_x:
        dx = dy.to(x_dtype) if x_trains else None
    return (
        dx,
        dy.to(residual_dtype) if residual_trains else None,
        dbias if bias_trains else None,
        None,
        None,
    )


_dropout_add.register_autograd(_gradient, setup_context=_keep_seed)
