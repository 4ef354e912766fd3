"""Pre-LN BERT: norms before attention and MLP instead of after the sums, with the same parameters.

Post-LN, as in BERT, is x = norm(x + f(x)): the gradient passes through a norm in each layer, is
largest near the output, and needs a small or slowly rising learning rate. Pre-LN is x = x +
f(norm(x)) with one norm at the end (Xiong et al. 2020, "On Layer Normalization in the Transformer
Architecture", https://arxiv.org/abs/2002.04745; DeepSpeed's BERT recipes use it).

Both have two norms in each layer and one more, so no parameter is added or left over:
``attention.output.LayerNorm`` normalizes the input of attention, ``output.LayerNorm`` the input of
the MLP, and ``embeddings.LayerNorm`` is applied last. It is not needed elsewhere: the first layer
normalizes the embeddings anyway. Each layer uses only its own parameters, so layers remain units of
ZeRO. Weights trained as post-LN do not fit pre-LN: this is for training from scratch.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_zero.errors import KernelError
from hf_zero.integrations.fused import residuals
from hf_zero.integrations.fused.fingerprints import of_class
from hf_zero.integrations.fused.replacement import Replacement

FINAL = "_hf_zero_final_norm"
LAYER = "4a5c4668c709+d935db5223a7"  # BertLayer, RobertaLayer, ElectraLayer


def normalise_before(model: nn.Module, fused: bool) -> list[Replacement]:
    """Make ``model`` pre-LN; return the replacements. ``fused``: sum, dropout and the following
    norm in one pass.

    Raises:
        KernelError: not a BERT, RoBERTa or ELECTRA encoder with known code.
    """
    changes: list[tuple[nn.Module, str, Callable[..., Any]]] = []
    finals: list[tuple[nn.Module, nn.LayerNorm]] = []
    for name, module in model.named_modules():
        encoder, final = (
            getattr(module, "encoder", None),
            getattr(getattr(module, "embeddings", None), "LayerNorm", None),
        )
        layers = getattr(encoder, "layer", None)
        if (
            not isinstance(encoder, nn.Module)
            or not isinstance(layers, nn.ModuleList)
            or not isinstance(final, nn.LayerNorm)
        ):
            continue
        prefix = f"{name}." if name else ""
        for index, layer in enumerate(layers):
            _check(layer, f"{prefix}encoder.layer.{index}")
            changes.append((layer, f"{prefix}encoder.layer.{index}", layer_forward(fused)))
        changes += [
            (encoder, f"{prefix}encoder", encode),
            (final, f"{prefix}embeddings.LayerNorm", pass_by),
        ]
        finals.append((encoder, final))
    if not changes:
        raise KernelError(
            f"pre_layer_norm is for BERT, RoBERTa and ELECTRA, and {type(model).__name__} has no "
            "embeddings.LayerNorm beside encoder.layer; "
            "leave it out"
        )
    for encoder, final in finals:
        encoder.__dict__[FINAL] = final  # not as a submodule: its parameters keep one name
    return [_forward(*change) for change in changes]


def _check(layer: nn.Module, name: str) -> None:
    if of_class(type(layer)) != LAYER or "forward" in layer.__dict__:
        raise KernelError(
            f"pre_layer_norm: {name} ({type(layer).__name__}) has other code than BERT's layer, as "
            "hf-zero knows it; leave it out"
        )
    if getattr(layer, "add_cross_attention", False):
        raise KernelError(
            f"pre_layer_norm: {name} has cross-attention, which is not provided; set "
            "add_cross_attention=False"
        )
    if layer.chunk_size_feed_forward:
        raise KernelError(f"pre_layer_norm: {name} has chunk_size_feed_forward set; set it to 0")


def _forward(module: nn.Module, name: str, function: Callable[..., Any]) -> Replacement:
    module.forward = types.MethodType(function, module)
    return Replacement(type(module).__name__, name, functools.partial(_put_back, module))


def _put_back(module: nn.Module) -> None:
    for name in ("forward", FINAL):
        module.__dict__.pop(name, None)


@functools.cache
def layer_forward(fused: bool) -> Callable[..., torch.Tensor]:
    add = residuals.added if fused else _add
    add_and_norm = residuals.normed_sum if fused else _add_and_norm

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        before, after = self.attention.output, self.output
        attended, _ = self.attention.self(
            before.LayerNorm(hidden_states),
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
        normed, hidden_states = add_and_norm(
            after.LayerNorm, before.dense(attended), hidden_states, before.dropout
        )
        return add(after.dense(self.intermediate(normed)), hidden_states, after.dropout)

    return forward


def _add(x: torch.Tensor, residual: torch.Tensor, dropout: nn.Module) -> torch.Tensor:
    return residual + dropout(x)


def _add_and_norm(
    norm: nn.Module, x: torch.Tensor, residual: torch.Tensor, dropout: nn.Module
) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + dropout(x)
    return norm(total), total


def encode(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the encoder's own forward, and apply the final norm to its output."""
    outputs, final = type(self).forward(self, *args, **kwargs), self.__dict__[FINAL]
    if isinstance(outputs, tuple):
        return (nn.LayerNorm.forward(final, outputs[0]), *outputs[1:])
    outputs.last_hidden_state = nn.LayerNorm.forward(final, outputs.last_hidden_state)
    return outputs


def pass_by(self: nn.Module, input: torch.Tensor) -> torch.Tensor:
    return input
