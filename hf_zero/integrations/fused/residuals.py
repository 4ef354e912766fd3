"""Forwards that add to the residual stream: the sum and the following norm in one pass, dropout
with a recomputed mask; and BERT with norms before attention and MLP (pre-LN).

[Note: pre-LN]
Post-LN, as in BERT, is x = norm(x + f(x)): the gradient passes through a norm in each layer, is
largest near the output, and needs a small or slowly rising learning rate. Pre-LN is x = x +
f(norm(x)) with one norm at the end (Xiong et al. 2020, "On Layer Normalization in the Transformer
Architecture", https://arxiv.org/abs/2002.04745; DeepSpeed's BERT recipes use it). Both have two
norms in each layer and one more, so no parameter is added or left over:
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
from hf_zero.integrations.fused.recognition import of_class, plain, takes
from hf_zero.integrations.fused.replacement import Replacement
from hf_zero.integrations.fused.sublayers import is_layer_norm, rms_of
from hf_zero.ops.norms import add_layer_norm, add_rms_norm, layer_norm_of_sum
from hf_zero.ops.residual import dropout_add

FINAL = "_hf_zero_final_norm"
LAYER = "4a5c4668c709+d935db5223a7"  # BertLayer, RobertaLayer, ElectraLayer


def normed_sum(
    norm: nn.Module, x: torch.Tensor, residual: torch.Tensor, dropout: nn.Module | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm(s), s) for s = dropout(x) + residual."""
    rms = rms_of(norm) if plain(norm, type(norm)) else None
    if rms is not None and takes(x, residual, rms.weight):
        return add_rms_norm(
            x if dropout is None else dropout(x), residual, rms.weight, rms.eps, offset=rms.offset
        )
    if (
        is_layer_norm(norm)
        and plain(norm, nn.LayerNorm)
        and takes(x, residual, norm.weight, norm.bias)
    ):
        p, training = (
            (dropout.p, dropout.training) if isinstance(dropout, nn.Dropout) else (0.0, False)
        )
        return add_layer_norm(
            x, residual, norm.weight, norm.bias, norm.eps, dropout=p, training=training
        )
    total = residual + (x if dropout is None else dropout(x))
    return norm(total), total


def added(x: torch.Tensor, residual: torch.Tensor, dropout: nn.Module) -> torch.Tensor:
    if isinstance(dropout, nn.Dropout) and takes(x, residual):
        return dropout_add(x, residual, dropout=dropout.p, training=dropout.training)
    return residual + dropout(x)


def bert_output(self: Any, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
    """Forward of BertSelfOutput and BertOutput, and of those of RoBERTa, ELECTRA, DeBERTa-v2:
    norm(dropout(dense(x)) + input).
    """
    x, norm, dropout = self.dense(hidden_states), self.LayerNorm, self.dropout
    if (
        is_layer_norm(norm)
        and plain(norm, nn.LayerNorm)
        and takes(x, input_tensor, norm.weight, norm.bias)
    ):
        return layer_norm_of_sum(
            x,
            input_tensor,
            norm.weight,
            norm.bias,
            norm.eps,
            dropout=dropout.p,
            training=dropout.training,
        )
    return norm(dropout(x) + input_tensor)


def llama_layer(
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = False,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Forward of Llama, Mistral, Qwen2, Qwen3, Gemma layers: fuses the first residual and the
    following norm.
    """
    attended, _ = self.self_attn(
        hidden_states=self.input_layernorm(hidden_states),
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        use_cache=use_cache,
        position_embeddings=position_embeddings,
        **kwargs,
    )
    normed, residual = normed_sum(self.post_attention_layernorm, attended, hidden_states)
    return residual + self.mlp(normed)


def phi3_layer(
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = False,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Forward of Phi3 layers: as :func:`llama_layer`, with dropout of the summands."""
    attended, _ = self.self_attn(
        hidden_states=self.input_layernorm(hidden_states),
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        use_cache=use_cache,
        position_embeddings=position_embeddings,
        **kwargs,
    )
    normed, residual = normed_sum(
        self.post_attention_layernorm, attended, hidden_states, self.resid_attn_dropout
    )
    return added(self.mlp(normed), residual, self.resid_mlp_dropout)


def mixtral_layer(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    attended, _ = self.self_attn(
        hidden_states=self.input_layernorm(hidden_states),
        position_embeddings=position_embeddings,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        **kwargs,
    )
    normed, residual = normed_sum(self.post_attention_layernorm, attended, hidden_states)
    return residual + self.mlp(normed)


def gpt2_block(
    self: Any,
    hidden_states: torch.Tensor,
    past_key_values: Any = None,
    attention_mask: torch.Tensor | None = None,
    encoder_hidden_states: torch.Tensor | None = None,
    encoder_attention_mask: torch.Tensor | None = None,
    use_cache: bool | None = False,
    **kwargs: Any,
) -> torch.Tensor:
    if encoder_hidden_states is not None:
        return type(self).forward(
            self,
            hidden_states,
            past_key_values,
            attention_mask,
            encoder_hidden_states,
            encoder_attention_mask,
            use_cache,
            **kwargs,
        )
    attended, _ = self.attn(
        self.ln_1(hidden_states),
        past_key_values=past_key_values,
        attention_mask=attention_mask,
        use_cache=use_cache,
        **kwargs,
    )
    normed, residual = normed_sum(self.ln_2, attended, hidden_states)
    return residual + self.mlp(normed)


def vit_layer(
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    attended, _ = self.attention(self.layernorm_before(hidden_states), attention_mask, **kwargs)
    normed, residual = normed_sum(self.layernorm_after, attended, hidden_states, self.dropout)
    return added(self.mlp(normed), residual, self.dropout)


def distilbert_block(
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    attended, _ = self.attention(hidden_states, attention_mask=attention_mask, **kwargs)
    normed, _ = normed_sum(self.sa_layer_norm, attended, hidden_states)
    return normed_sum(self.output_layer_norm, self.ffn(normed), normed)[0]


def t5_feed_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return added(self.DenseReluDense(self.layer_norm(hidden_states)), hidden_states, self.dropout)


def t5_self_attention(
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, ...]:
    attended, bias, weights = self.SelfAttention(
        self.layer_norm(hidden_states),
        mask=attention_mask,
        position_bias=position_bias,
        past_key_values=past_key_values,
        **kwargs,
    )
    return added(attended, hidden_states, self.dropout), bias, weights


def t5_cross_attention(
    self: Any,
    hidden_states: torch.Tensor,
    key_value_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, ...]:
    attended, bias, weights = self.EncDecAttention(
        self.layer_norm(hidden_states),
        mask=attention_mask,
        key_value_states=key_value_states,
        position_bias=position_bias,
        past_key_values=past_key_values,
        **kwargs,
    )
    return added(attended, hidden_states, self.dropout), bias, weights


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
    add = added if fused else _add
    add_and_norm = normed_sum if fused else _add_and_norm

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
