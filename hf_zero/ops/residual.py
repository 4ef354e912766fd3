"""Dropout and residual in one pass each way.

Dropout (Srivastava et al., JMLR 2014) draws its mask from a seed (see philox.py) and draws it again
in the backward: neither the mask nor an activation is saved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zero.errors import KernelError
from hf_zero.ops import model_reference as reference
from hf_zero.ops.dispatch import Kernel, as_rows, check_alike, check_float
from hf_zero.ops.operators import GradientContext, operator
from hf_zero.ops.philox import draw_seed


def dropout_add(
    x: Tensor, residual: Tensor, *, dropout: float = 0.0, training: bool = False
) -> Tensor:
    """Return ``residual + dropout(x)``: x's shape, in the wider dtype of x and residual.

    Args:
        x, residual: [..., width], fp32, bf16 or fp16.
        dropout: the probability that an element of ``x`` is zeroed; the others are scaled by
            1/(1 - dropout). Only in training; the seed is drawn from torch's generator.

    Raises:
        KernelError: a dtype, device or shape does not fit, or dropout is not a probability.
    """
    check_float("dropout_add", x=x, residual=residual)
    check_alike("dropout_add", "x", x, "residual", residual)
    if not 0 <= dropout <= 1:
        raise KernelError(
            f"dropout_add: dropout={dropout} is not a probability; give a number between 0 and 1"
        )
    if not training or dropout == 0:
        return residual + x
    return _dropout_add(x, residual, draw_seed(x.device), dropout)


def _ones(device: torch.device) -> Tensor:
    return torch.ones(5, 24, device=device)


def _seed(device: torch.device) -> Tensor:
    return torch.ones(1, dtype=torch.int64, device=device)


DROPOUT_ADD = Kernel(
    "dropout_add",
    "residual:dropout_add",
    reference.dropout_add,
    example=lambda device: (_ones(device), _ones(device), _seed(device), 0.5, _ones(device)),
)
DROPOUT_ADD_BACKWARD = Kernel(
    "dropout_add_backward",
    "residual:dropout_add_backward",
    reference.dropout_add_backward,
    example=lambda device: (_ones(device), _seed(device), 0.5, _ones(device)),
)


@operator("hf_zero::dropout_add")
def _dropout_add(x: Tensor, residual: Tensor, seed: Tensor, dropout: float) -> Tensor:
    out = _sum_like(x, residual)
    if x.numel():
        DROPOUT_ADD(as_rows(x), as_rows(residual), seed, dropout, as_rows(out))
    return out


@operator("hf_zero::dropout_add_backward")
def _dropout_add_backward(dy: Tensor, seed: Tensor, dropout: float, x_dtype: torch.dtype) -> Tensor:
    dx = dy.new_empty(dy.shape, dtype=x_dtype)
    if dy.numel():
        DROPOUT_ADD_BACKWARD(as_rows(dy), seed, dropout, as_rows(dx))
    return dx


@_dropout_add.register_fake
def _(x: Tensor, residual: Tensor, seed: Tensor, dropout: float) -> Tensor:
    return _sum_like(x, residual)


@_dropout_add_backward.register_fake
def _(dy: Tensor, seed: Tensor, dropout: float, x_dtype: torch.dtype) -> Tensor:
    return dy.new_empty(dy.shape, dtype=x_dtype)


def _sum_like(x: Tensor, residual: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))


def _keep_seed(
    ctx: GradientContext, inputs: tuple[Tensor, Tensor, Tensor, float], output: Tensor
) -> None:
    x, residual, seed, ctx.dropout = inputs
    ctx.dtypes = x.dtype, residual.dtype
    ctx.save_for_backward(seed)


def _gradient(ctx: GradientContext, dy: Tensor) -> tuple[Tensor | None, ...]:
    (seed,) = ctx.saved_tensors
    x_dtype, residual_dtype = ctx.dtypes
    x_trains, residual_trains = ctx.needs_input_grad[:2]
    return (
        _dropout_add_backward(dy, seed, ctx.dropout, x_dtype) if x_trains else None,
        dy.to(residual_dtype) if residual_trains else None,
        None,
        None,
    )


_dropout_add.register_autograd(_gradient, setup_context=_keep_seed)
