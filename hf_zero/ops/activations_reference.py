"""The activation kernels in plain torch: computed in fp32, rounded once.

They write into their output arguments, as the kernels do.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_SLOPE = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


def activate(x: Tensor, act: str) -> Tensor:
    """Return ``act`` of fp32 ``x``."""
    if act == "silu":
        return x * torch.sigmoid(x)
    if act == "gelu_tanh":
        return 0.5 * x * (1 + torch.tanh(_SLOPE * (x + _CUBIC * x * x * x)))
    return 0.5 * x * torch.erfc(-x * math.sqrt(0.5))


def derivative(x: Tensor, act: str) -> Tensor:
    """Return the derivative of ``act`` at fp32 ``x``."""
    if act == "silu":
        sigmoid = torch.sigmoid(x)
        return sigmoid * (1 + x * (1 - sigmoid))
    if act == "gelu_tanh":
        tanh = torch.tanh(_SLOPE * (x + _CUBIC * x * x * x))
        return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * _SLOPE * (1 + 3 * _CUBIC * x * x)
    return 0.5 * torch.erfc(-x * math.sqrt(0.5)) + x * torch.exp(-0.5 * x * x) / math.sqrt(
        2 * math.pi
    )


def bias_act(x: Tensor, bias: Tensor | None, act: str, out: Tensor) -> None:
    """Compute ``out = act(x + bias)``; x, out [rows, width], bias [width]."""
    out.copy_(activate(_sum(x, bias), act))


def bias_act_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, act: str, dx: Tensor, dbias: Tensor | None
) -> None:
    """Compute ``dx = dy * act'(x + bias)`` and ``dbias``, its sum over the rows."""
    grad = dy.float() * derivative(_sum(x, bias), act)
    dx.copy_(grad)
    if dbias is not None:
        dbias.copy_(grad.sum(0))


def gated(gate: Tensor, up: Tensor, act: str, out: Tensor) -> None:
    """Compute ``out = act(gate) * up``; all [rows, width]."""
    out.copy_(activate(gate.float(), act) * up.float())


def gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor, act: str, dgate: Tensor, dup: Tensor
) -> None:
    """Compute ``dgate = dy * up * act'(gate)`` and ``dup = dy * act(gate)``."""
    wide, grad = gate.float(), dy.float()
    dgate.copy_(grad * up.float() * derivative(wide, act))
    dup.copy_(grad * activate(wide, act))


def _sum(x: Tensor, bias: Tensor | None) -> Tensor:
    return x.float() if bias is None else x.float() + bias.float()
