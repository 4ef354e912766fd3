"""Block-sparse attention under DeepSpeed's names (``deepspeed.ops.sparse_attention``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_zero.errors import KernelError
from hf_zero.integrations.fused.sparse_attention import extend_position_embedding, sparsify
from hf_zero.ops.sparse_attention import SparsityConfig, sparse_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class SparseSelfAttention(nn.Module):
    """Attention of [batch, heads, length, width] over a configuration's blocks, in any dtype and at
    any length.

    ``key_padding_mask`` [batch, length] is added to scores in mode "add" (0 or a large negative
    number, as in DeepSpeed's default); mode "mul" keeps keys where it is not 0. A key is either
    attended to or not: in "add" if its mask is above -1000. Masks over pairs of tokens and relative
    biases raise KernelError: express them in the layout.
    """

    def __init__(
        self,
        sparsity_config: SparsityConfig,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
    ) -> None:
        super().__init__()
        if key_padding_mask_mode not in ("add", "mul"):
            raise KernelError(
                f'key_padding_mask_mode is {key_padding_mask_mode!r}; it must be "add" or "mul"'
            )
        self.sparsity_config = sparsity_config
        self.key_padding_mask_mode = key_padding_mask_mode

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rpe: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if rpe is not None or attn_mask is not None:
            raise KernelError(
                "SparseSelfAttention takes no rpe and no attn_mask; put blocks into the "
                "sparsity_config, or make it unidirectional"
            )
        padding = None
        if key_padding_mask is not None:
            flat = key_padding_mask.reshape(key_padding_mask.shape[0], -1)
            padding = flat > -1000 if self.key_padding_mask_mode == "add" else flat != 0
        return sparse_attention(query, key, value, self.sparsity_config, key_padding_mask=padding)


class SparseAttentionUtils:
    """DeepSpeed's helpers by name.

    Padding to blocks is not among them: sparse_attention pads its inputs.
    """

    extend_position_embedding = staticmethod(extend_position_embedding)

    @staticmethod
    def update_tokenizer_model_max_length(
        tokenizer: PreTrainedTokenizerBase, max_position: int
    ) -> object:
        tokenizer.model_max_length = max_position
        tokenizer.init_kwargs["model_max_length"] = max_position
        return tokenizer

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: PreTrainedModel, max_position: int, sparsity_config: SparsityConfig
    ) -> PreTrainedModel:
        """Return ``model`` with block-sparse attention, set by `sparsify`; its positions are
        extended to ``max_position`` if they are fewer.
        """
        config = model.config.get_text_config()
        if getattr(config, "max_position_embeddings", 0) < max_position:
            extend_position_embedding(model, max_position)
        sparsify(model, sparsity_config)
        return model
