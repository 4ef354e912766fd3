"""``deepspeed.ops.sparse_attention``."""

from hf_zero.integrations.not_built import type_of
from hf_zero.integrations.sparse_self_attention import SparseAttentionUtils, SparseSelfAttention
from hf_zero.ops.sparse_attention import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)

BertSparseSelfAttention = type_of(
    "deepspeed.ops.sparse_attention.BertSparseSelfAttention",
    "use hf_zero.optimize(model, sparse_attention=config), which keeps the layers",
)

__all__ = [
    "BSLongformerSparsityConfig",
    "BertSparseSelfAttention",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "SparseAttentionUtils",
    "SparseSelfAttention",
    "SparsityConfig",
    "VariableSparsityConfig",
]
