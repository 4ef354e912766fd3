"""All-to-alls that change what is split over the sequence-parallel ranks: the tokens, or the heads
of attention (Ulysses, arXiv 2309.14509). Differentiable; the backward is the other exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_zero.distributed.collectives import MeshDim


def scatter_heads(dim: MeshDim, key: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of each of ``tensors`` [B, H, tokens of this rank, D], of one dtype, this rank's share of the
    heads with the tokens of all ranks: [B, H / ranks, tokens, D]. One message to each rank.
    """
    return _ScatterHeads.apply(dim, key, *tensors)  # type: ignore[no-any-return]


def gather_heads(dim: MeshDim, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """The way back: [B, H / ranks, tokens, D] to [B, H, tokens of this rank, D], which is laid out
    as [B, tokens, H, D].
    """
    return _GatherHeads.apply(dim, key, tensor)  # type: ignore[no-any-return]


def gather(dim: MeshDim, key: str, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``tensor`` of each rank, differentiably: each gets the sum of what all ranks' losses say
    about its own.
    """
    return _GatherTensors.apply(dim, key, tensor)  # type: ignore[no-any-return]


def all_gather(dim: MeshDim, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` of each rank, stacked: [ranks, ...]. Without gradients."""
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
    """[B, H, s, D] each to [B, H / ranks, S, D]."""
    rows = [each.unflatten(1, (dim.size, -1)).movedim(1, 0) for each in tensors]
    return [torch.cat(came, dim=2) for came in _swap(dim, key, rows)]


def _to_tokens(dim: MeshDim, key: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """[B, H / ranks, S, D] each to [B, H, s, D]."""
    rows = [each.unflatten(2, (dim.size, -1)).movedim(2, 0) for each in tensors]
    # modules hold heads beside each other, so that is how they lie in memory
    return [
        torch.cat([part.transpose(1, 2) for part in came], dim=2).transpose(1, 2)
        for came in _swap(dim, key, rows)
    ]


def _swap(dim: MeshDim, key: str, rows: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    """``rows[i][rank]`` to each rank, all of them in one message; for each i what came from the
    ranks, in their order.
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
