"""Forwards of norms and feed-forward layers, and the fusion of several projections of one input.

Norms: RMSNorm of Llama, Gemma (1 + weight) and T5, and torch's LayerNorm. Feed-forward layers: bias
+ GELU in one pass, gate and up into SwiGLU or GeGLU, optionally one GEMM for gate and up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_zero.integrations.fused.recognition import gelu_of, of_class, plain, takes
from hf_zero.ops import activations, norms
from hf_zero.ops.packed_linear import packed_linear_whole

LLAMA = "9635bcd843f3"  # and Mistral, Qwen2, Qwen3, Mixtral, Phi3
GEMMA = "2dad5f576075+6dc7d2ba16b4"  # and Gemma2, Gemma3
T5 = "3152525beceb"
_CODES: dict[type, str] = {}  # of norms
Forward = Callable[..., torch.Tensor]


class Rms(NamedTuple):
    """Parameters of an RMSNorm, x · (offset + weight) / sqrt(mean(x²) + eps)."""

    weight: torch.Tensor
    eps: float
    offset: float


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


def gate_and_up(
    activation: object, x: torch.Tensor, gate: nn.Module, up: nn.Module, packed: bool
) -> torch.Tensor:
    """Return activation(gate(x)) · up(x) for SiLU and the two GELUs."""
    approximate = gelu_of(activation)
    together = whole(x, (gate, up)) if packed and gate.out_features == up.out_features else None
    if together is not None:
        return (
            activations.geglu_packed(together, approximate=approximate)
            if approximate
            else activations.swiglu_packed(together)
        )
    first, second = gate(x), up(x)
    return (
        activations.geglu(first, second, approximate=approximate)
        if approximate
        else activations.swiglu(first, second)
    )


def biased_gelu(linear: nn.Module, x: torch.Tensor, activation: object) -> torch.Tensor:
    """Return gelu(linear(x)); the activation kernel adds the bias if the layer is a plain matrix
    and bias.
    """
    approximate = gelu_of(activation) or "none"
    if (
        plain(linear, nn.Linear)
        and linear.bias is not None
        and takes(x, linear.weight, linear.bias)
    ):
        return activations.gelu(F.linear(x, linear.weight), linear.bias, approximate=approximate)
    # GPT-2: the weight is [in, out]
    if plain(linear, Conv1D) and takes(x, linear.weight, linear.bias):
        return activations.gelu(x @ linear.weight, linear.bias, approximate=approximate)
    return activations.gelu(linear(x), approximate=approximate)


@functools.cache
def gated_mlp(packed: bool) -> Forward:
    """Forward of the MLPs of Llama, Mistral, Qwen2, Qwen3, Gemma, Gemma2, Gemma3."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not takes(x):
            return type(self).forward(self, x)
        return self.down_proj(gate_and_up(self.act_fn, x, self.gate_proj, self.up_proj, packed))

    return forward


def packed_gate_up(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Forward of Phi3's MLP: gate and up are one parameter."""
    if not takes(hidden_states):
        return type(self).forward(self, hidden_states)
    return self.down_proj(activations.swiglu_packed(self.gate_up_proj(hidden_states)))


@functools.cache
def t5_gated(packed: bool) -> Forward:
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        if not takes(hidden_states, self.wo.weight):  # transformers may keep wo in fp32
            return type(self).forward(self, hidden_states)
        return self.wo(
            self.dropout(gate_and_up(self.act, hidden_states, self.wi_0, self.wi_1, packed))
        )

    return forward


def t5_plain(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    if not takes(hidden_states, self.wo.weight):
        return type(self).forward(self, hidden_states)
    return self.wo(self.dropout(biased_gelu(self.wi, hidden_states, self.act)))


def bert_intermediate(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Forward of the intermediate layers of BERT, RoBERTa, ELECTRA, DeBERTa-v2."""
    if not takes(hidden_states):
        return type(self).forward(self, hidden_states)
    return biased_gelu(self.dense, hidden_states, self.intermediate_act_fn)


def two_layers(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Forward of the MLPs of Phi and ViT."""
    if not takes(hidden_states):
        return type(self).forward(self, hidden_states)
    return self.fc2(biased_gelu(self.fc1, hidden_states, self.activation_fn))


def distilbert(self: Any, input: torch.Tensor) -> torch.Tensor:
    if not takes(input):
        return type(self).forward(self, input)
    return self.dropout(self.lin2(biased_gelu(self.lin1, input, self.activation)))


def gpt2(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    if not takes(hidden_states):
        return type(self).forward(self, hidden_states)
    return self.dropout(self.c_proj(biased_gelu(self.c_fc, hidden_states, self.act)))


def whole(x: torch.Tensor, linears: Sequence[nn.Module]) -> torch.Tensor | None:
    """Return the outputs of all ``linears`` for ``x``, concatenated, from one GEMM; None unless
    each is a plain matrix and bias of x's dtype.
    """
    weights, biases = [], []
    for linear in linears:
        if not plain(linear, nn.Linear) or linear.weight.dtype != x.dtype:
            return None
        weights.append(linear.weight)
        biases.append(linear.bias)
    return packed_linear_whole(x, weights, None if all(bias is None for bias in biases) else biases)
