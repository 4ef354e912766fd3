"""Forwards of attention layers: one GEMM for q, k and v, and one launch to rotate q and k. The
attention itself is that of the interface.

The forwards of these classes differ only in the fields of :class:`Style`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.integrations.fused.recognition import fingerprint, takes
from hf_zero.integrations.fused.sublayers import whole
from hf_zero.ops.rotary import rotary, split_rotary

HALF_ROTATION = "7b6c9b425ca0"  # rotate_half
# apply_rotary_pos_emb of Llama and its copies; of Phi3, which rotates part of the head
ROTATIONS = ("4a8f8b85ee37", "9af4c6b9d146")


def _nothing(self: Any) -> dict[str, Any]:
    return {}


def _own_window(self: Any) -> dict[str, Any]:
    return {"sliding_window": self.sliding_window}


def _window_of_config(self: Any) -> dict[str, Any]:
    return {"sliding_window": getattr(self.config, "sliding_window", None)}


def _window_and_softcap(self: Any) -> dict[str, Any]:
    return {"sliding_window": self.sliding_window, "softcap": self.attn_logit_softcapping}


@dataclass(frozen=True)
class Style:
    """Differences of a family's attention: the names of its modules, norms of q and k, and the
    keywords that it passes to the attention interface.
    """

    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    head_dim: str = "head_dim"
    norms_heads: bool = False
    dropout: Callable[[Any], float] = lambda self: self.attention_dropout
    tells: Callable[[Any], Mapping[str, Any]] = _nothing
    rotates: bool = True


STYLES = {
    "ee9b11aafecd": Style(),  # Llama, Gemma
    "9fd52adda2db": Style(tells=_window_of_config),  # Mistral, Mixtral
    "4303b9d12716": Style(tells=_own_window),  # Qwen2
    "0a88802c2838": Style(tells=_own_window, norms_heads=True),  # Qwen3
    "5c514af68ddf": Style(tells=_own_window, norms_heads=True),  # Gemma3
    "348368a8632b": Style(tells=_window_and_softcap),  # Gemma2
    "fa2f220d6a34": Style(output="dense"),  # Phi
    "0bf1e71cd24f": Style(projections=("qkv_proj",), tells=_window_of_config),  # Phi3
    "8dd6ecd27397": Style(rotates=False),  # ViT
    "702f2d13f32b": Style(
        ("query", "key", "value"),
        "",
        "attention_head_size",
        dropout=lambda self: self.dropout.p,
        rotates=False,
    ),  # BERT, RoBERTa, ELECTRA
    "d0d382603421": Style(
        ("q_lin", "k_lin", "v_lin"),
        "out_lin",
        "attention_head_size",
        dropout=lambda self: self.dropout.p,
        rotates=False,
    ),  # DistilBERT
}


def known_rotation(cls: Any) -> bool:
    """Return whether the module of ``cls`` rotates like Llama: pairs from the first and second
    half, positions along dimension 2.
    """
    names = cls.forward.__globals__
    return (
        fingerprint(names.get("apply_rotary_pos_emb")) in ROTATIONS
        and fingerprint(names.get("rotate_half")) == HALF_ROTATION
    )


@functools.cache
def attention(cls: Any, style: Style, packed: bool, rotated: bool) -> Callable[..., Any]:
    """Return the forward of ``cls``, with one GEMM for q, k and v if ``packed`` and one launch for
    their rotation if ``rotated``.
    """
    from transformers.cache_utils import EncoderDecoderCache
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    original: Callable[..., Any] = cls.forward
    names = original.__globals__
    eager: Any = names["eager_attention_forward"]
    rotate: Any = names.get("apply_rotary_pos_emb")

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape, width = hidden_states.shape[:-1], getattr(self, style.head_dim)
        qkv, sizes = _projected(self, style, hidden_states, packed)
        # unused without rotation
        cos, sin = position_embeddings or (hidden_states, hidden_states)
        if isinstance(qkv, torch.Tensor) and rotated and not style.norms_heads and takes(qkv, cos):
            q, k, v = split_rotary(qkv, cos, sin, sizes[0] // width, sizes[1] // width)
        else:
            parts = qkv.split(sizes, dim=-1) if isinstance(qkv, torch.Tensor) else qkv
            # [batch, heads, tokens, head_dim]
            q, k, v = (part.view(*shape, -1, width).transpose(1, 2) for part in parts)
            if style.norms_heads:
                q, k = self.q_norm(q), self.k_norm(k)
            if style.rotates:
                q, k = (
                    rotary(q, k, cos, sin)
                    if rotated and takes(q, cos)
                    else _rotated_by(rotate, q, k, cos, sin)
                )
        if past_key_values is not None:
            if isinstance(past_key_values, EncoderDecoderCache):
                past_key_values = past_key_values.self_attention_cache
            k, v = past_key_values.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        dropout = style.dropout(self) if self.training else 0.0
        out, weights = attend(
            self,
            q,
            k,
            v,
            attention_mask,
            dropout=dropout,
            scaling=self.scaling,
            **style.tells(self),
            **kwargs,
        )
        out = out.reshape(*shape, -1).contiguous()
        return (getattr(self, style.output)(out) if style.output else out), weights

    if style.rotates:
        return forward

    def without_positions(
        self: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return forward(self, hidden_states, None, attention_mask, past_key_values, **kwargs)

    return without_positions


def _projected(
    self: Any, style: Style, x: torch.Tensor, packed: bool
) -> tuple[torch.Tensor | list[torch.Tensor], list[int]]:
    """Return q, k and v concatenated in one tensor if one GEMM computed them, else as three
    tensors; and the width of each.
    """
    layers = [getattr(self, name) for name in style.projections]
    if len(layers) == 1:
        keys = self.num_key_value_heads * self.head_dim
        return layers[0](x), [self.config.num_attention_heads * self.head_dim, keys, keys]
    together = whole(x, layers) if packed and takes(x) else None
    return [layer(x) for layer in layers] if together is None else together, [
        layer.out_features for layer in layers
    ]


def _rotated_by(
    rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the module's own rotation to the first ``cos.shape[-1]`` numbers of each head; the
    others are unchanged (Phi).
    """
    width = cos.shape[-1]
    if width == q.shape[-1]:
        return rotate(q, k, cos, sin)
    turned_q, turned_k = rotate(q[..., :width], k[..., :width], cos, sin)
    return torch.cat((turned_q, q[..., width:]), dim=-1), torch.cat(
        (turned_k, k[..., width:]), dim=-1
    )
