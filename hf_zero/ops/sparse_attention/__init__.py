"""Block-sparse attention: layouts, and attention over only their blocks."""

from .attention import sparse_attention
from .layouts import (
    BigBirdSparsityConfig,
    BlockLayout,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
    from_section,
)

__all__ = [
    "BSLongformerSparsityConfig",
    "BigBirdSparsityConfig",
    "BlockLayout",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "SparsityConfig",
    "VariableSparsityConfig",
    "from_section",
    "sparse_attention",
]
