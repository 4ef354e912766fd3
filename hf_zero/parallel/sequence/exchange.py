"""All-to-alls between sequence-parallel ranks that change the split dimension: tokens, or heads of
attention (Ulysses, arXiv 2309.14509). Differentiable; the backward is the inverse exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_zero.distributed.collectives import MeshDim


def scatter_heads(dim: MeshDim, key: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Exchange ``tensors`` [B, H, tokens of this rank, D], of one dtype, for this rank's share of
    the heads with the tokens of all ranks: [B, H / ranks, tokens, D]. One message to each rank.
    """
    return _ScatterHeads.apply(dim, key, *tensors)  # type: ignore[no-any-return]


def gather_heads(dim: MeshDim, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`scatter_heads`: [B, H / ranks, tokens, D] to [B, H, tokens of this rank,
    D], laid out in memory as [B, tokens, H, D].
    """
    return _GatherHeads.apply(dim, key, tensor)  # type: ignore[no-any-return]


def gather(dim: MeshDim, key: str, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """All-gather ``tensor`` differentiably; each rank's gradient is the sum over the losses of all
    ranks.
    """
    return _GatherTensors.apply(dim, key, tensor)  # type: ignore[no-any-return]


def all_gather(dim: MeshDim, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` of each rank, stacked: [ranks, ...]. Without gradients."""
    own = tensor.detach().contiguous()
    whole = own.new_empty(dim.size, *own.shape)
    dim.all_gather([(whole.view(-1), own.view(-1))], key).wait()
    return whole


class _ScatterHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dim: MeshDim, key: str, *tensors: torch.Tensor) -> Any:
        ctx.dim, ctx.key = dim, key
        return tuple(_to_heads(dim, key, tensors))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *_to_tokens(ctx.dim, f"gradients of {ctx.key}", grads)


class _GatherHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dim: MeshDim, key: str, tensor: torch.Tensor) -> Any:
        ctx.dim, ctx.key = dim, key
        return _to_tokens(dim, key, [tensor])[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, None, *_to_heads(ctx.dim, f"gradients of {ctx.key}", [grad])


class _GatherTensors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dim: MeshDim, key: str, tensor: torch.Tensor) -> Any:
        ctx.dim, ctx.key = dim, key
        parts = all_gather(dim, key, tensor).unbind()
        if not tensor.is_floating_point():
            ctx.mark_non_differentiable(*parts)
        return parts

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        total = torch.stack(grads)
        ctx.dim.all_reduce(total, f"gradients of {ctx.key}").wait()
        return None, None, total[ctx.dim.rank]


def _to_heads(dim: MeshDim, key: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Convert each of ``tensors`` from [B, H, s, D] to [B, H / ranks, S, D]."""
    rows = [each.unflatten(1, (dim.size, -1)).movedim(1, 0) for each in tensors]
    return [torch.cat(came, dim=2) for came in _swap(dim, key, rows)]


def _to_tokens(dim: MeshDim, key: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Convert each of ``tensors`` from [B, H / ranks, S, D] to [B, H, s, D]."""
    rows = [each.unflatten(2, (dim.size, -1)).movedim(2, 0) for each in tensors]
    # memory layout [B, s, H, D]: modules hold the heads of a token side by side
    return [
        torch.cat([part.transpose(1, 2) for part in came], dim=2).transpose(1, 2)
        for came in _swap(dim, key, rows)
    ]


def _swap(dim: MeshDim, key: str, rows: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    """Send ``rows[i][rank]`` to each rank, all in one message; return for each i the received
    tensors in rank order.
    """
    flat = [each.reshape(dim.size, -1) for each in rows]
    sent = torch.cat(flat, dim=1) if len(flat) > 1 else flat[0].contiguous()
    sizes = [sent.shape[1]] * dim.size
    handle, came = dim.all_to_all(sent.view(-1), sizes, sizes, key)
    handle.wait()
    parts = [part.split([each.shape[1] for each in flat]) for part in came.view(dim.size, -1)]
    return [
        tuple(part[place].view(each.shape[1:]) for part in parts) for place, each in enumerate(rows)
    ]
