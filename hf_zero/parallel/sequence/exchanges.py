"""Exchanges of tensors between the ranks that share a sequence, each differentiable.

All-to-alls change the dimension that is split: tokens, or heads (Ulysses, arXiv 2309.14509); the
backward of one is the inverse exchange.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_zero.distributed.collectives import MeshDim
from hf_zero.ops.operators import GradientContext


def scatter_heads(dim: MeshDim, key: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Exchange ``tensors`` [B, H, tokens of this rank, D], of one dtype, for this rank's share of
    the heads with the tokens of all ranks: [B, H / ranks, tokens, D]. One message to each rank.
    """
    if dim.size == 1:
        return tensors
    return _ScatterHeads.apply(dim, key, *tensors)  # type: ignore[no-any-return]


def gather_heads(dim: MeshDim, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`scatter_heads`: [B, H / ranks, tokens, D] to [B, H, tokens of this rank,
    D], laid out in memory as [B, tokens, H, D].
    """
    if dim.size == 1:
        return tensor
    return _GatherHeads.apply(dim, key, tensor)[0]  # type: ignore[no-any-return]


def gather(dim: MeshDim, key: str, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """All-gather ``tensor`` differentiably: gradients are summed over the losses of all ranks."""
    return _GatherTensors.apply(dim, key, tensor)  # type: ignore[no-any-return]


def all_gather(dim: MeshDim, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` of each rank, stacked: [ranks, ...]. Without gradients."""
    local = tensor.detach().contiguous()
    whole = local.new_empty(dim.size, *local.shape)
    dim.all_gather([(whole.view(-1), local.view(-1))], key).wait()
    return whole


class _ScatterHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: GradientContext, dim: MeshDim, key: str, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.dim, ctx.key = dim, key
        return tuple(_to_heads(dim, key, tensors))

    @staticmethod
    def backward(ctx: GradientContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *_GatherHeads.apply(ctx.dim, _gradients_of(ctx.key), *grads)


class _GatherHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: GradientContext, dim: MeshDim, key: str, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.dim, ctx.key = dim, key
        return tuple(_to_tokens(dim, key, tensors))

    @staticmethod
    def backward(ctx: GradientContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *_ScatterHeads.apply(ctx.dim, _gradients_of(ctx.key), *grads)


class _GatherTensors(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: GradientContext, dim: MeshDim, key: str, tensor: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.dim, ctx.key = dim, key
        parts = all_gather(dim, key, tensor).unbind()
        if not tensor.is_floating_point():
            ctx.mark_non_differentiable(*parts)
        return parts

    @staticmethod
    def backward(ctx: GradientContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, _SumOwn.apply(ctx.dim, _gradients_of(ctx.key), *grads)


class _SumOwn(torch.autograd.Function):
    """Sum of the tensors of this rank's index over all ranks, of one for each rank."""

    @staticmethod
    def forward(
        ctx: GradientContext, dim: MeshDim, key: str, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.dim, ctx.key = dim, key
        total = torch.stack(tensors)
        dim.all_reduce(total, key).wait()
        return total[dim.rank]

    @staticmethod
    def backward(ctx: GradientContext, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *_GatherTensors.apply(ctx.dim, _gradients_of(ctx.key), grad)


def _gradients_of(key: str) -> str:
    return f"gradients of {key}"


def _to_heads(dim: MeshDim, key: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Convert each of ``tensors`` from [B, H, s, D] to [B, H / ranks, S, D]."""
    rows = [tensor.unflatten(1, (dim.size, -1)).movedim(1, 0) for tensor in tensors]
    return [torch.cat(came, dim=2) for came in _swap(dim, key, rows)]


def _to_tokens(dim: MeshDim, key: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Convert each of ``tensors`` from [B, H / ranks, S, D] to [B, H, s, D]."""
    rows = [tensor.unflatten(2, (dim.size, -1)).movedim(2, 0) for tensor in tensors]
    # memory layout [B, s, H, D]: modules hold the heads of a token side by side
    return [
        torch.cat([part.transpose(1, 2) for part in came], dim=2).transpose(1, 2)
        for came in _swap(dim, key, rows)
    ]


def _swap(dim: MeshDim, key: str, rows: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    """Send ``rows[i][rank]`` to each rank, all in one message; return for each i the received
    tensors in rank order.
    """
    flat = [row.reshape(dim.size, -1) for row in rows]
    sent = torch.cat(flat, dim=1) if len(flat) > 1 else flat[0].contiguous()
    sizes = [sent.shape[1]] * dim.size
    handle, came = dim.all_to_all(sent.view(-1), sizes, sizes, key)
    handle.wait()
    parts = [part.split([row.shape[1] for row in flat]) for part in came.view(dim.size, -1)]
    return [
        tuple(part[index].view(row.shape[1:]) for part in parts) for index, row in enumerate(rows)
    ]
