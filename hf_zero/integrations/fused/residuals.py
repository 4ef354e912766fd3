"""Forwards that add to the residual stream: the sum and the following norm in one pass, dropout
with a recomputed mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_zero.integrations.fused.conditions import plain, takes
from hf_zero.integrations.fused.norms import is_layer_norm, rms_of
from hf_zero.ops.norms import add_layer_norm, add_rms_norm, layer_norm_of_sum
from hf_zero.ops.residual import dropout_add


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
