"""Longer inputs for models with learned positions: the position table is repeated, as for
Longformer (Beltagy et al., arXiv:2004.05150, section 5).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_zero.errors import KernelError

_TABLES = ("position_embeddings", "wpe")


def extend_position_embedding(model: Any, max_position: int) -> Any:
    """Extend ``model`` to ``max_position`` tokens: tile its position table, and adapt its buffers
    over positions and its config. Returns ``model``.

    For BERT, RoBERTa and similar models (whose table has rows before position 0: they stay in
    front, and the config counts them), GPT-2, DistilBERT. Rotary models have no table; only their
    config changes. Call it before the optimizer is made.

    Raises:
        KernelError: fewer positions than the model has, a sharded table, or a model without
            positions.
    """
    tables = [
        (module, name)
        for module in model.modules()
        for name in _TABLES
        if isinstance(getattr(module, name, None), nn.Embedding)
    ]
    extra = 0
    for module, name in tables:
        table = getattr(module, name)
        before = 0 if table.padding_idx is None else table.padding_idx + 1
        _tile(table, before, max_position)
        _lengthen(module, before + max_position)
        extra = before
    config = model.config.get_text_config()
    if not tables and not hasattr(config, "max_position_embeddings"):
        raise KernelError(
            f"{type(model).__name__} has neither a table of positions nor max_position_embeddings; "
            "there is nothing to extend"
        )
    config.max_position_embeddings = max_position + extra
    return model


def _tile(table: nn.Embedding, before: int, positions: int) -> None:
    rows = table.weight.data
    if rows.dim() != 2 or rows.shape[0] != table.num_embeddings:
        raise KernelError(
            "the table of positions is sharded; call extend_position_embedding "
            "before hf_zero.initialize"
        )
    rows_of_model = rows.shape[0] - before
    if positions < rows_of_model:
        raise KernelError(
            f"max_position is {positions}, but the model has {rows_of_model} positions already"
        )
    source = torch.arange(positions, device=rows.device) % rows_of_model + before
    table.weight.data = torch.cat([rows[:before], rows[source]])
    table.num_embeddings = before + positions


def _lengthen(module: nn.Module, length: int) -> None:
    """Lengthen buffers [1, positions] that number positions or hold token type 0."""
    for name in ("position_ids", "token_type_ids"):
        buffer = module._buffers.get(name)
        if buffer is not None:
            ids = torch.arange(length, device=buffer.device)
            module._buffers[name] = (ids if name == "position_ids" else torch.zeros_like(ids)).to(
                buffer.dtype
            )[None]
