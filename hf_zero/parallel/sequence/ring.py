"""Ring attention: attention over a sequence whose tokens stay on the ranks of a ring, around which
keys and values travel (arXiv 2310.01889).

[Note: ring]
In each round a rank attends with its queries to the keys that it has just received, while it sends
them on, and merges the outputs by their log-sum-exps. In the backward keys and values travel once
more; the gradients of a rank's keys and values follow them, grow on each rank, and return.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch.autograd.function import once_differentiable

from hf_zero.distributed.collectives import MeshDim
from hf_zero.distributed.handle import Handle
from hf_zero.ops.operators import GradientContext
from hf_zero.parallel.sequence.block_kernels import kernels_on
from hf_zero.parallel.sequence.blocks import blocks_of
from hf_zero.parallel.sequence.documents import Documents
from hf_zero.zero.gather.model_patches import outside_graphs

_NAME = "keys and values"


@partial(outside_graphs, callees=False)  # its blocks have too many shapes
def ring_attention(
    dim: MeshDim,
    documents: Documents,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return causal attention within ``documents`` over the tokens of all ranks along ``dim``, for
    the tokens of this rank: [B, s, H, Dv]. Collective along ``dim``, as is the backward.

    Shapes: query [B, H, s, D], key [B, Hkv, s, D], value [B, Hkv, s, Dv], H a multiple of Hkv; the
    tokens are those that :class:`hf_zero.parallel.sequence.division.Division` gives this rank.
    ``scale`` of the scores: 1 / sqrt(D) unless given. ``sinks`` [H]: scores of a further key, with
    a value of zero, to which every query attends.
    """
    by_token = (tensor.transpose(1, 2).contiguous() for tensor in (query, key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    output: torch.Tensor = _RingAttention.apply(dim, documents, scale, sinks, *by_token)
    return output


class _RingAttention(torch.autograd.Function):
    """Tensors are [B, s, heads, D]; sums over blocks are in fp32 or wider."""

    @staticmethod
    def forward(
        ctx: GradientContext,
        dim: MeshDim,
        documents: Documents,
        scale: float,
        sinks: torch.Tensor | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        kernels = kernels_on(query.device)
        blocks = blocks_of(documents, len(query), dim.rank, dim.size, query.device)
        out = query.new_zeros(*query.shape[:3], value.shape[-1], dtype=_wide(query))
        if sinks is None:
            sums = out.new_full(out.shape[:3], -math.inf)
        else:
            sums = sinks.to(out.dtype).expand(out.shape[:3]).contiguous()
        for source, keys, values in _rounds(dim, key, value):
            for block in blocks[source]:
                q, *before = (block.queries.take(tensor) for tensor in (query, out, sums))
                theirs = (block.keys.take(tensor) for tensor in (keys, values))
                merged = _merge(before, kernels.attend(block.pattern, q, *theirs, scale=scale))
                for whole, part in zip((out, sums), merged):
                    block.queries.put(whole, part)
        result = out.to(query.dtype)
        ctx.dim, ctx.blocks, ctx.scale = dim, blocks, scale
        ctx.save_for_backward(query, key, value, result, sums, sinks)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: GradientContext, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, sums, sinks = ctx.saved_tensors
        dim, grad, kernels = ctx.dim, grad.contiguous(), kernels_on(grad.device)
        for_queries = torch.zeros_like(query, dtype=_wide(query))
        own_grads, message = _zeros(key, value), None
        for source, keys, values in _rounds(dim, key, value):
            flat = own_grads if source == dim.rank else _zeros(key, value)
            totals = _split(flat, key, value)
            for block in ctx.blocks[source]:
                mine = [block.queries.take(tensor) for tensor in (grad, query, out, sums)]
                theirs = (block.keys.take(tensor) for tensor in (keys, values))
                block_grads = kernels.gradients(
                    block.pattern, *mine[:2], *theirs, *mine[2:], scale=ctx.scale
                )
                block.queries.add(for_queries, block_grads[0])
                for whole, part in zip(totals, block_grads[1:]):
                    block.keys.add(whole, part)
            if source == dim.rank:
                continue
            if message is not None:
                flat += _received(*message)
            message = dim.send_to_next(flat, f"gradients of {_NAME}")
        if message is not None:
            own_grads += _received(*message)
        for_keys, for_values = _split(own_grads, key, value)
        for_sinks = None
        if sinks is not None:
            products = (grad * out).sum(-1, dtype=sums.dtype)
            for_sinks = -((sinks - sums).exp() * products).sum((0, 1)).to(sinks.dtype)
        grads = for_queries.to(query.dtype), for_keys.to(key.dtype), for_values.to(value.dtype)
        return None, None, None, for_sinks, *grads


def _rounds(
    dim: MeshDim, key: torch.Tensor, value: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield, for each rank of the ring, the rank and its keys and values, this rank's first. The
    next ones arrive while the caller computes.
    """
    if dim.size == 1:
        yield 0, key, value
        return
    flat = torch.cat([tensor.flatten() for tensor in (key, value)])
    for step in range(dim.size):
        source, (keys, values) = (dim.rank - step) % dim.size, _split(flat, key, value)
        if step + 1 == dim.size:
            yield source, keys, values
            return
        message = dim.send_to_next(flat, _NAME)
        yield source, keys, values
        flat = _received(*message)


def _received(handle: Handle, message: torch.Tensor) -> torch.Tensor:
    handle.wait()
    return message


def _split(flat: torch.Tensor, *like: torch.Tensor) -> list[torch.Tensor]:
    """Return views of the parts of ``flat`` with the shapes of ``like``."""
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like)]


def _zeros(*like: torch.Tensor) -> torch.Tensor:
    return like[0].new_zeros(sum(tensor.numel() for tensor in like), dtype=_wide(like[0]))


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _merge(
    before: Sequence[torch.Tensor], part: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge outputs [..., D] and their log-sum-exps [...] over different keys."""
    (out, sums), (more, more_sums) = before, part
    largest = torch.maximum(sums, more_sums)  # finite: a query attends to every key of its block
    old, new = ((values - largest).exp() for values in (sums, more_sums))
    total = old + new
    merged = (out * (old / total).unsqueeze(-1)).add_(more * (new / total).unsqueeze(-1))
    return merged, largest + total.log()
