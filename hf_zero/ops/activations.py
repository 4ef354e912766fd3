"""Activations of a transformer's MLP in one pass each way: bias + GELU, SwiGLU, GeGLU.

Only the inputs are saved for the backward, which recomputes the activation. Formulas: GELU
(Hendrycks and Gimpel, arXiv:1606.08415), exact as ``x Φ(x)`` or with tanh; SwiGLU and GeGLU
(Shazeer, arXiv:2002.05202) as ``act(gate) * up``. Everything is computed in fp32 and rounded once,
where torch rounds after each operation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zero.errors import KernelError
from hf_zero.ops import model_reference as reference
from hf_zero.ops.dispatch import Kernel, as_rows, check_alike, check_bias, check_float
from hf_zero.ops.operators import GradientContext, operator

_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}


def gelu(x: Tensor, bias: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    """Return ``gelu(x + bias)``, of x's shape and dtype.

    Args:
        x: [..., width], fp32, bf16 or fp16.
        bias: [width] or None.
        approximate: "none" is the exact form, "tanh" the one GPT-2 uses, as in
            ``torch.nn.functional.gelu``.

    Raises:
        KernelError: a dtype, device or shape does not fit.
    """
    check_float("gelu", x=x, bias=bias)
    check_bias("gelu", bias, x)
    return _bias_act(x, bias, _gelu("gelu", approximate))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``: both [..., width], of one dtype. Halves of one packed tensor are
    read in place.

    Raises:
        KernelError: a dtype, device or shape does not fit.
    """
    return _checked_gated("swiglu", gate, up, "silu")


def geglu(gate: Tensor, up: Tensor, *, approximate: str = "tanh") -> Tensor:
    """Return ``gelu(gate) * up``, as :func:`swiglu`; ``approximate`` as in :func:`gelu`."""
    return _checked_gated("geglu", gate, up, _gelu("geglu", approximate))


def swiglu_packed(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of [..., 2 width], the gate first: [..., width]. Its gradient is
    one tensor too, so nothing is concatenated.

    Raises:
        KernelError: a dtype does not fit, or the width is odd.
    """
    return _checked_packed("swiglu_packed", gate_up, "silu")


def geglu_packed(gate_up: Tensor, *, approximate: str = "tanh") -> Tensor:
    """Return ``gelu(gate) * up``, as :func:`swiglu_packed`; ``approximate`` as in :func:`gelu`."""
    return _checked_packed("geglu_packed", gate_up, _gelu("geglu_packed", approximate))


def _gelu(op: str, approximate: str) -> str:
    if approximate not in _GELUS:
        raise KernelError(f"{op}: approximate={approximate!r}; give 'none' or 'tanh'")
    return _GELUS[approximate]


def _checked_gated(op: str, gate: Tensor, up: Tensor, act: str) -> Tensor:
    check_float(op, gate=gate, up=up)
    check_alike(op, "gate", gate, "up", up)
    if gate.dtype != up.dtype:
        raise KernelError(f"{op}: gate is {gate.dtype} and up {up.dtype}; cast one of them")
    return _gated(gate, up, act)


def _checked_packed(op: str, gate_up: Tensor, act: str) -> Tensor:
    check_float(op, gate_up=gate_up)
    if gate_up.shape[-1] % 2:
        raise KernelError(
            f"{op}: gate_up has width {gate_up.shape[-1]}; give gate and up of the same "
            "width, one after the other"
        )
    return _gated_packed(gate_up, act)


def _rows(count: int, device: torch.device) -> list[Tensor]:
    return [torch.ones(5, 24, device=device) for _ in range(count)]


BIAS_ACT = Kernel(
    "bias_act",
    "activations:bias_act",
    reference.bias_act,
    example=lambda on: (*_rows(1, on), torch.ones(24, device=on), "gelu", *_rows(1, on)),
)
BIAS_ACT_BACKWARD = Kernel(
    "bias_act_backward",
    "activations:bias_act_backward",
    reference.bias_act_backward,
    example=lambda on: (
        *_rows(2, on),
        torch.ones(24, device=on),
        "gelu",
        *_rows(1, on),
        torch.ones(24, device=on),
    ),
)
GATED = Kernel(
    "gated",
    "activations:gated",
    reference.gated,
    example=lambda device: (*_rows(2, device), "silu", *_rows(1, device)),
)
GATED_BACKWARD = Kernel(
    "gated_backward",
    "activations:gated_backward",
    reference.gated_backward,
    example=lambda device: (*_rows(3, device), "silu", *_rows(2, device)),
)


@operator("hf_zero::bias_act")
def _bias_act(x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    out = _like(x)
    if x.numel():
        BIAS_ACT(as_rows(x), bias if bias is None else bias.contiguous(), act, as_rows(out))
    return out


@operator("hf_zero::bias_act_backward")
def _bias_act_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, act: str, bias_trains: bool
) -> tuple[Tensor, Tensor]:
    """Return dx and dbias; dbias is empty if the bias needs no gradient."""
    dx, dbias = _like(x), _bias_gradient(x, bias, bias_trains)
    if x.numel():
        row, drow = bias if bias is None else bias.contiguous(), dbias if bias_trains else None
        BIAS_ACT_BACKWARD(as_rows(dy), as_rows(x), row, act, as_rows(dx), drow)
    return dx, dbias.zero_() if x.numel() == 0 else dbias


@operator("hf_zero::gated")
def _gated(gate: Tensor, up: Tensor, act: str) -> Tensor:
    out = _like(gate)
    if gate.numel():
        GATED(as_rows(gate), as_rows(up), act, as_rows(out))
    return out


@operator("hf_zero::gated_backward")
def _gated_backward(dy: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    dgate, dup = _like(gate), _like(up)
    if gate.numel():
        GATED_BACKWARD(as_rows(dy), as_rows(gate), as_rows(up), act, as_rows(dgate), as_rows(dup))
    return dgate, dup


@operator("hf_zero::gated_packed")
def _gated_packed(gate_up: Tensor, act: str) -> Tensor:
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    if out.numel():
        gate, up = as_rows(gate_up).chunk(2, dim=-1)
        GATED(gate, up, act, as_rows(out))
    return out


@operator("hf_zero::gated_packed_backward")
def _gated_packed_backward(dy: Tensor, gate_up: Tensor, act: str) -> Tensor:
    grad = _like(gate_up)
    if grad.numel():
        gate, up = as_rows(gate_up).chunk(2, dim=-1)
        dgate, dup = as_rows(grad).chunk(2, dim=-1)
        GATED_BACKWARD(as_rows(dy), gate, up, act, dgate, dup)
    return grad


def _like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _bias_gradient(x: Tensor, bias: Tensor | None, needed: bool) -> Tensor:
    return x.new_empty(0) if bias is None or not needed else bias.new_empty(bias.shape)


@_bias_act.register_fake
def _(x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    return _like(x)


@_bias_act_backward.register_fake
def _(
    dy: Tensor, x: Tensor, bias: Tensor | None, act: str, bias_trains: bool
) -> tuple[Tensor, Tensor]:
    return _like(x), _bias_gradient(x, bias, bias_trains)


@_gated.register_fake
def _(gate: Tensor, up: Tensor, act: str) -> Tensor:
    return _like(gate)


@_gated_backward.register_fake
def _(dy: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    return _like(gate), _like(up)


@_gated_packed.register_fake
def _(gate_up: Tensor, act: str) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@_gated_packed_backward.register_fake
def _(dy: Tensor, gate_up: Tensor, act: str) -> Tensor:
    return _like(gate_up)


def _keep_inputs(
    ctx: GradientContext, inputs: tuple[*tuple[Tensor | None, ...], str], output: object
) -> None:
    *tensors, ctx.act = inputs
    ctx.save_for_backward(*tensors)


def _bias_act_gradient(ctx: GradientContext, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, bias = ctx.saved_tensors
    bias_trains = bias is not None and ctx.needs_input_grad[1]
    dx, dbias = _bias_act_backward(dy, x, bias, ctx.act, bias_trains)
    return dx, dbias if bias_trains else None, None


def _gated_gradient(ctx: GradientContext, dy: Tensor) -> tuple[Tensor | None, ...]:
    return *_gated_backward(dy, *ctx.saved_tensors, ctx.act), None


def _gated_packed_gradient(ctx: GradientContext, dy: Tensor) -> tuple[Tensor | None, ...]:
    return _gated_packed_backward(dy, *ctx.saved_tensors, ctx.act), None


_bias_act.register_autograd(_bias_act_gradient, setup_context=_keep_inputs)
_gated.register_autograd(_gated_gradient, setup_context=_keep_inputs)
_gated_packed.register_autograd(_gated_packed_gradient, setup_context=_keep_inputs)
