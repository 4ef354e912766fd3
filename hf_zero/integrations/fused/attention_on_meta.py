"""Attention of models of transformers on the meta device, which has only shapes: of whole
sequences, or of one rank's part with the exchange of tokens for heads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hf_zero.parallel.sequence.attention import ALL_ROWS, Documents, attend

NAME = "hf_zero_without_memory"
_of_thread = threading.local()  # .part: this thread's (axis, tokens of a sequence)


class _Axis:
    """Mesh dimension of the ranks that share a sequence; only its first rank exists."""

    rank = 0

    def __init__(self, size: int):
        self.size, self.ranks = size, tuple(range(size))

    def all_to_all(
        self, sent: torch.Tensor, sizes: list[int], counts: list[int], key: str
    ) -> tuple[Any, torch.Tensor]:
        return SimpleNamespace(wait=lambda: None), sent.new_empty(sum(counts))


class _Shapes(torch.autograd.Function):
    """Shapes of the output and saved tensors of a kernel without a matrix of tokens × tokens: it
    saves queries, keys, values, the output, and a sum for each row of each head.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        rows, heads, tokens, _ = query.shape
        out = query.new_empty(rows, tokens, heads, value.shape[-1])
        sums = query.new_empty(rows, heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        _count_products(2, query, value)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, _, _ = ctx.saved_tensors
        _count_products(5, query, value)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _count_products(products: int, query: torch.Tensor, value: torch.Tensor) -> None:
    """Report the FLOPs of ``products`` matrix products of a kernel that computes all pairs of
    tokens, half of which a causal one skips.
    """
    count = getattr(_of_thread, "count", None)
    if count is not None:
        rows, heads, tokens, width = query.shape
        count(products * 2 * rows * heads * tokens * value.shape[2] * width / 2)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers' AttentionInterface."""
    axis, length = _of_thread.part
    if axis.size == 1:
        return _Shapes.apply(query, key, value), None
    documents = Documents(0, length, ((ALL_ROWS, 0, length),))
    return attend(axis, _Shapes.apply, query, key, value, documents), None


@contextmanager
def without_memory(
    model: nn.Module,
    length: int,
    ranks: int = 1,
    count: Callable[[float], None] | None = None,
    axis: Any = None,
) -> Iterator[None]:
    """Replace the attention of ``model``, a copy, by shapes for sequences of ``length`` tokens
    shared by ``ranks``: the output and saved tensors of a kernel like flash attention, if the model
    uses transformers' AttentionInterface. ``count`` is called with the FLOPs of each. ``axis``: the
    mesh dimension of these ranks; None: one that counts no messages.
    """
    from transformers import AttentionInterface, PreTrainedModel

    inside = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
    AttentionInterface.register(NAME, _attend)
    for each in inside[:1]:
        if each._can_set_attn_implementation():
            each.set_attn_implementation(NAME)
    _of_thread.part, _of_thread.count = (axis or _Axis(ranks), length), count
    try:
        yield
    finally:
        _of_thread.part = _of_thread.count = None
