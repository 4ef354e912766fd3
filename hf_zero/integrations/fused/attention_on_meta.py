"""Attention of models of transformers on the meta device, which has only shapes: of whole
sequences, or of one rank's part with the exchange of tokens for heads or around a ring.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import torch
from torch import nn

from hf_zero.distributed.collectives import MeshDim
from hf_zero.ops.operators import GradientContext
from hf_zero.parallel.sequence.attention import Axes, attend
from hf_zero.parallel.sequence.block_kernels import KERNELS, Kernels
from hf_zero.parallel.sequence.blocks import Pattern
from hf_zero.parallel.sequence.division import Division
from hf_zero.parallel.sequence.documents import Documents

NAME = "hf_zero_without_memory"
_of_thread = threading.local()  # .part: this thread's (axes, tokens of a sequence)


class _Axis:
    """Mesh dimension of the ranks that share a sequence; only its first rank exists."""

    rank = 0

    def __init__(self, size: int):
        self.size, self.ranks = size, tuple(range(size))

    def all_to_all(
        self, sent: torch.Tensor, sizes: list[int], counts: list[int], key: str
    ) -> tuple[SimpleNamespace, torch.Tensor]:
        return SimpleNamespace(wait=lambda: None), sent.new_empty(sum(counts))

    def send_to_next(self, sent: torch.Tensor, key: str) -> tuple[object, torch.Tensor]:
        return self.all_to_all(sent, [], [sent.numel()], key)


class _Shapes(torch.autograd.Function):
    """Shapes of the output and saved tensors of a kernel without a matrix of tokens × tokens: it
    saves queries, keys, values, the output, and a sum for each row of each head.
    """

    @staticmethod
    def forward(
        ctx: GradientContext, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        rows, heads, tokens, _ = query.shape
        out = query.new_empty(rows, tokens, heads, value.shape[-1])
        sums = query.new_empty(rows, heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        _count_products(2, query, value)
        return out

    @staticmethod
    def backward(ctx: GradientContext, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        _count_products(5, query, value)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _count_products(products: int, query: torch.Tensor, value: torch.Tensor) -> None:
    """Report the FLOPs of ``products`` matrix products of a kernel that computes all pairs of
    tokens, half of which a causal one skips.
    """
    rows, heads, tokens, width = query.shape
    _count_pairs(products, rows * heads * tokens * value.shape[2] * width / 2)


def _count_pairs(products: int, multiplications: float) -> None:
    count = getattr(_of_thread, "count", None)
    if count is not None:
        count(products * 2 * multiplications)


def _block(
    pattern: Pattern, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes of the output of a block, and of its log-sum-exps."""
    _count_pairs(2, query.numel() * key.shape[1] * (1 if pattern is Pattern.FULL else 0.5))
    out = query.new_empty(*query.shape[:3], value.shape[-1])
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


def _gradients(pattern: Pattern, *tensors: torch.Tensor, scale: float) -> list[torch.Tensor]:
    """Shapes of the gradients of query, key and value of a block."""
    _, query, key, value, _, _ = tensors
    _count_pairs(5, query.numel() * key.shape[1] * (1 if pattern is Pattern.FULL else 0.5))
    return [torch.empty_like(tensor) for tensor in (query, key, value)]


KERNELS["meta"] = Kernels(_block, _gradients)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers' AttentionInterface."""
    axes, length = _of_thread.part
    if axes.division.ranks == 1:
        return _Shapes.apply(query, key, value), None
    core = _Shapes.apply if axes.division.context == 1 else None
    return attend(axes, core, query, key, value, Documents.one_a_row(length)), None


@contextmanager
def without_memory(
    model: nn.Module,
    length: int,
    division: Division | None = None,
    count: Callable[[float], None] | None = None,
    axes: Axes | None = None,
) -> Iterator[None]:
    """Replace the attention of ``model``, a copy, by shapes for sequences of ``length`` tokens: the
    output and saved tensors of a kernel like flash attention, if the model uses transformers'
    AttentionInterface. ``count`` is called with the FLOPs of each. ``axes``: the mesh dimensions of
    the ranks that share a sequence; None: ones for ``division``, which count no messages.
    """
    from transformers import AttentionInterface, PreTrainedModel

    inside = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    AttentionInterface.register(NAME, _attend)
    for outermost in inside[:1]:
        if outermost._can_set_attn_implementation():
            outermost.set_attn_implementation(NAME)
    if axes is None:
        division = division or Division()
        heads, ring = (
            cast("MeshDim", _Axis(size)) for size in (division.sequence, division.context)
        )
        axes = Axes(heads, ring)
    _of_thread.part, _of_thread.count = (axes, length), count
    try:
        yield
    finally:
        _of_thread.part = _of_thread.count = None
