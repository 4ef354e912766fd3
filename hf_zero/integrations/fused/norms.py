"""Forwards of norms: RMSNorm of Llama, Gemma (1 + weight) and T5, and torch's LayerNorm."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn

from hf_zero.integrations.fused.conditions import takes
from hf_zero.integrations.fused.fingerprints import of_class
from hf_zero.ops import norms

LLAMA = "9635bcd843f3"  # and Mistral, Qwen2, Qwen3, Mixtral, Phi3
GEMMA = "2dad5f576075+6dc7d2ba16b4"  # and Gemma2, Gemma3
T5 = "3152525beceb"


class Rms(NamedTuple):
    """Parameters of an RMSNorm, x · (offset + weight) / sqrt(mean(x²) + eps)."""

    weight: torch.Tensor
    eps: float
    offset: float


_CODES: dict[type, str] = {}


def learn(module: nn.Module) -> None:
    """Record the RMSNorm code of the module's class for :func:`rms_of`, which compiled forwards
    call and which must not read sources.
    """
    if (code := of_class(type(module))) in (LLAMA, GEMMA, T5):
        _CODES[type(module)] = code


def rms_of(module: Any) -> Rms | None:
    """Return the parameters of an RMSNorm whose class :func:`learn` has recorded; None for any
    other module.
    """
    code = _CODES.get(type(module))
    if code is None:
        return None
    return (
        Rms(module.weight, module.eps, 1.0)
        if code == GEMMA
        else Rms(module.weight, module.variance_epsilon, 0.0)
    )


def is_layer_norm(module: nn.Module) -> TypeGuard[nn.LayerNorm]:
    """Return whether the module is torch's LayerNorm over the last dimension, with weight and
    bias.
    """
    return (
        isinstance(module, nn.LayerNorm)
        and type(module).forward is nn.LayerNorm.forward
        and len(module.normalized_shape) == 1
        and module.weight is not None
        and module.bias is not None
    )


def rms_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    if not takes(hidden_states, self.weight):
        return type(self).forward(self, hidden_states)
    return norms.rms_norm(hidden_states, self.weight, self.variance_epsilon)


def gemma_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    if not takes(x, self.weight):
        return type(self).forward(self, x)
    return norms.rms_norm(x, self.weight, self.eps, offset=1.0)


def layer_norm(self: Any, input: torch.Tensor) -> torch.Tensor:
    if not takes(input, self.weight, self.bias):
        return type(self).forward(self, input)
    return norms.layer_norm(input, self.weight, self.bias, self.eps)
