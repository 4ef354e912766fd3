"""Dropout by masks that a test draws, so that a plain run can be given those of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F

Draw = Callable[[tuple[int, ...], float], torch.Tensor]  # what is kept, by shape and probability


@contextmanager
def dropout_by(draw: Draw) -> Iterator[None]:
    """Dropout by the masks that ``draw`` gives, also of the weights of causal attention."""
    plain, attention = F.dropout, F.scaled_dot_product_attention

    def dropout(
        x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        return x * draw(tuple(x.shape), p) / (1 - p) if training and p else x

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        if not dropout_p:
            return attention(q, k, v, attn_mask, is_causal=is_causal, **kwargs)
        assert attn_mask is None and is_causal
        scores = q @ k.mT * (kwargs.get("scale") or q.shape[-1] ** -0.5)
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(ahead, -torch.inf).softmax(-1)
        return dropout(weights, dropout_p) @ v

    F.dropout = dropout
    F.scaled_dot_product_attention = attend  # type: ignore[assignment]
    try:
        yield
    finally:
        F.dropout, F.scaled_dot_product_attention = plain, attention
