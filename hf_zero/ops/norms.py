"""RMSNorm and LayerNorm over the last dimension, differentiable, in one pass with the preceding
operations: a residual sum, dropout.

RMSNorm: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. LayerNorm: Ba, Kiros and
Hinton, "Layer Normalization", 2016. With ``n(t) = (t - mean(t)) / sqrt(var(t) + eps)``, for RMSNorm
without the mean,

    y = n(t) * (offset + weight) + bias,    t = dropout(x) + residual

in fp32, rounded once, where transformers rounds n(t) before the weight too. ``t`` is rounded to the
dtype of y before it is normalized. The backward, with ``g = dy * (offset + weight)``:

    dt = (g - mean(g) - n * mean(g * n)) * rstd
    d_weight = sum(dy * n),    d_bias = sum(dy)

The norm's input is the only tensor of x's size saved for the backward.
"""

from __future__ import annotations

import torch

from hf_zero.errors import KernelError
from hf_zero.ops import model_reference as reference
from hf_zero.ops.dispatch import Kernel
from hf_zero.ops.operators import operator
from hf_zero.ops.philox import draw_seed

# The widest rows that fit into a block's registers, forward and backward (counts:
# kernels/README.md).
WIDEST, WIDEST_CENTERED, WIDEST_WITH_DROPOUT = 16_384, 8_192, 4_096


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, offset: float = 0.0
) -> torch.Tensor:
    """Return the RMSNorm of ``x`` [..., width] by ``offset + weight`` [width] (offset 1 in Gemma),
    in the dtype of ``x``.

    Raises:
        KernelError: shapes, dtypes or devices that do not fit together.
    """
    _check(x, weight, None, None, 0.0)
    return _norm(x, None, weight, None, None, eps, offset, 0.0, False, False)[0]


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float = 1e-5
) -> torch.Tensor:
    """Return the LayerNorm of ``x`` [..., width] by ``weight`` and ``bias`` [width], in the dtype
    of ``x``.

    Raises:
        KernelError: shapes, dtypes or devices that do not fit together.
    """
    _check(x, weight, bias, None, 0.0)
    return _norm(x, None, weight, bias, None, eps, 0.0, 0.0, True, False)[0]


def layer_norm_of_sum(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float = 1e-5,
    *,
    dropout: float = 0.0,
    training: bool = False,
) -> torch.Tensor:
    """Return the LayerNorm of ``dropout(x) + residual`` alone, as in post-LN blocks (BERT); the sum
    is written where a backward may read it.

    Raises:
        KernelError: shapes, dtypes or devices that do not fit together, or a dropout outside [0,
            1).
    """
    _check(x, weight, bias, residual, dropout)
    seed = draw_seed(x.device) if training and dropout > 0 else None
    keep = torch.is_grad_enabled()
    return _norm(x, residual, weight, bias, seed, eps, 0.0, dropout, True, keep)[0]


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    dropout: float,
) -> None:
    if not x.is_floating_point() or x.dim() == 0:
        raise KernelError(
            f"a norm of {x.dtype} {list(x.shape)}: x must be floating point, [..., width]"
        )
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is None:
            continue
        if vector.shape != x.shape[-1:]:
            raise KernelError(
                f"{name} of a norm is {list(vector.shape)}; x is {list(x.shape)}, so it must be "
                f"{list(x.shape[-1:])}"
            )
        if vector.device != x.device:
            raise KernelError(
                f"{name} of a norm is on {vector.device}, x on {x.device}; move one of them"
            )
    if residual is not None and (residual.shape != x.shape or residual.device != x.device):
        raise KernelError(
            f"the residual of a norm is {list(residual.shape)} on {residual.device}, x "
            f"{list(x.shape)} on {x.device}; they must be alike"
        )
    if not 0 <= dropout < 1:
        raise KernelError(f"dropout {dropout} of a norm: it must lie in [0, 1)")


def _too_wide(x: torch.Tensor, seed: torch.Tensor | None, centered: bool) -> str:
    """Return why the kernels do not compute the norm of rows like ``x``, or "" if they do."""
    if x.dtype == torch.float64:
        return "fp64"
    limit = WIDEST_WITH_DROPOUT if seed is not None else WIDEST_CENTERED if centered else WIDEST
    return f"rows of {x.shape[-1]:,}, more than {limit:,}" if x.shape[-1] > limit else ""


def _forward_example(device: torch.device) -> tuple[object, ...]:
    x = torch.randn(8, 128, device=device)
    return x, x.flip(0), x[0], x[1], draw_seed(device), 1e-5, 0.0, 0.1, True, True


def _backward_example(device: torch.device) -> tuple[object, ...]:
    x = torch.randn(8, 128, device=device)
    mean, rstd = x.mean(1), x.std(1).reciprocal()
    return (x.flip(0), x, x[0], x[1], mean, rstd, draw_seed(device), 0.0, 0.1, True, True)


NORM = Kernel(
    "norm",
    "norms:forward",
    reference.norm_forward,
    lambda x, residual, weight, bias, seed, eps, offset, dropout, centered, keep: _too_wide(
        x, seed, centered
    ),
    _forward_example,
)
NORM_BACKWARD = Kernel(
    "norm_backward",
    "norms:backward",
    reference.norm_backward,
    lambda dy, saved, weight, bias, mean, rstd, seed, offset, dropout, centered, trains: _too_wide(
        dy, seed, centered
    ),
    _backward_example,
)


@operator("hf_zero::norm")
def _norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seed: torch.Tensor | None,
    eps: float,
    offset: float,
    dropout: float,
    centered: bool,
    keep_total: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    y, total, mean, rstd = NORM(
        x, residual, weight, bias, seed, eps, offset, dropout, centered, keep_total
    )
    return y, total, mean, rstd


@_norm.register_fake
def _(x, residual, weight, bias, seed, eps, offset, dropout, centered, keep_total):
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    rows = x.shape[:-1].numel()
    return (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(x.shape if keep_total else (0,), dtype=dtype),
        x.new_empty(rows if centered else 0, dtype=torch.float32),
        x.new_empty(rows, dtype=torch.float32),
    )


@operator("hf_zero::norm_backward")
def _norm_backward(
    dy: torch.Tensor,
    saved: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    seed: torch.Tensor | None,
    offset: float,
    dropout: float,
    centered: bool,
    weight_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dx, dropped, d_weight, d_bias = NORM_BACKWARD(
        dy, saved, weight, bias, mean, rstd, seed, offset, dropout, centered, weight_grad
    )
    return dx, dropped, d_weight, d_bias


@_norm_backward.register_fake
def _(dy, saved, weight, bias, mean, rstd, seed, offset, dropout, centered, weight_grad):
    return (
        dy.new_empty(saved.shape),
        dy.new_empty(saved.shape if seed is not None else (0,)),
        weight.new_empty(weight.shape if weight_grad else (0,)),
        (weight if bias is None else bias).new_empty(
            weight.shape if weight_grad and bias is not None else (0,)
        ),
    )


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, residual, weight, bias, seed, _, ctx.offset, ctx.dropout, ctx.centered, _ = inputs
    _, total, mean, rstd = output
    ctx.dtypes = x.dtype, None if residual is None else residual.dtype
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(total, mean, rstd)
    ctx.save_for_backward(x if residual is None else total, weight, bias, mean, rstd, seed)


def _differentiate(ctx, dy, *_unused):  # type: ignore[no-untyped-def]
    saved, weight, bias, mean, rstd, seed = ctx.saved_tensors
    if dy is None:
        return (None,) * 10
    dx, dropped, d_weight, d_bias = _norm_backward(
        dy,
        saved,
        weight,
        bias,
        mean,
        rstd,
        seed,
        ctx.offset,
        ctx.dropout,
        ctx.centered,
        any(ctx.needs_input_grad[2:4]),
    )
    x_dtype, residual_dtype = ctx.dtypes
    return (
        (dx if seed is None else dropped).to(x_dtype) if ctx.needs_input_grad[0] else None,
        dx.to(residual_dtype) if residual_dtype is not None and ctx.needs_input_grad[1] else None,
        d_weight if ctx.needs_input_grad[2] else None,
        d_bias if bias is not None and ctx.needs_input_grad[3] else None,
        *(None,) * 6,
    )


_norm.register_autograd(_differentiate, setup_context=_save)
