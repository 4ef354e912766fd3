"""Attention over sequences that are split among ranks: each rank computes some of the heads over
all tokens, or over those of a ring, and the outputs return to the ranks of their tokens.

[Note: exchange]
All-to-alls between sequence-parallel ranks change the split dimension: tokens, or heads (Ulysses,
arXiv 2309.14509). They are differentiable; the backward is the inverse exchange.
``DistributedAttention`` does so around a model's own attention.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_zero.device.kinds import autocast_dtype
from hf_zero.device.pinned import upload
from hf_zero.distributed.collectives import MeshDim
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.distributed.process_group import get_world_size
from hf_zero.errors import ConfigError
from hf_zero.ops.operators import GradientContext
from hf_zero.parallel.sequence.division import AXIS, CONTEXT, KEY, Division
from hf_zero.parallel.sequence.documents import Documents
from hf_zero.parallel.sequence.ring import ring_attention

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# computes [B, S, H, D] from q [B, H, S, D], k and v [B, Hkv, S, D]
Core = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Axes:
    """The dimensions of the ranks that share a sequence: those that exchange tokens for ``heads``,
    and those of the ``ring``.
    """

    heads: MeshDim
    ring: MeshDim

    @property
    def division(self) -> Division:
        return Division(self.heads.size, self.ring.size)


def attend(
    axes: Axes,
    core: Core | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of this rank's tokens to those of all ranks along ``axes``.

    Shapes: query [B, H, s, D], key and value [B, Hkv, s, D] of this rank's s tokens, to [B, s, H,
    D]. Each rank computes its share of the heads, over the tokens of all ranks if there is no ring.
    Key and value heads that do not divide among the ranks along ``axes.heads``, or are fewer, are
    repeated before the exchange. ``core`` computes one document at a time; those of equal length
    form a batch. None, and documents with a window: :func:`ring_attention` computes them, with
    ``scale`` and ``sinks`` [H]. Raises ConfigError for heads or tokens that do not divide.
    """
    division = axes.division
    if query.shape[2] * division.ranks != documents.length or key.shape[2] != query.shape[2]:
        raise ConfigError(
            f"attention was given {query.shape[2]} queries and {key.shape[2]} keys of this rank, "
            f"and position_ids are of {documents.length} tokens over {division.ranks} ranks; under "
            f"{division} every tensor of a batch holds this rank's part of it, and no cache is "
            "used: cut it with hf_zero.sequence_parallel().shard(batch), and generate after "
            "model.eval()"
        )
    query, key, value = spread_heads(axes.heads, query, key, value)
    if core is None:
        if sinks is not None:
            sinks = sinks.chunk(axes.heads.size)[axes.heads.rank]
        out = ring_attention(axes.ring, documents, query, key, value, scale, sinks)
    else:
        out = _by_document(core, query, key, value, documents)
    return gather_heads(axes.heads, "attention", out.transpose(1, 2)).transpose(1, 2)


def spread_heads(
    dim: MeshDim, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return this rank's share of the heads of query [B, H, s, D], key and value [B, Hkv, s, D],
    over the tokens of all ranks: [B, heads, S, D]. Key and value heads are repeated if they do not
    divide among the ranks. Raises ConfigError for query heads that do not divide.
    """
    heads, shared = query.shape[1], key.shape[1]
    check_heads(heads, shared, dim.size)
    repeats = math.lcm(shared, dim.size) // shared
    if repeats > 1:
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    # attention would cast them to the dtype of autocast; casting first sends fewer bytes
    dtype = autocast_dtype(query.device.type) or value.dtype
    sent = (tensor.to(dtype) for tensor in (query, key, value))
    return scatter_heads(dim, "queries, keys and values", *sent)


def check_heads(heads: int, shared: int, ranks: int, tensor: int = 1) -> None:
    """Raise ConfigError unless ``ranks`` divides ``heads``. ``shared``: number of key and value
    heads, for the message. ``tensor``: number of tensor-parallel ranks that have so many heads
    each.
    """
    if heads % ranks:
        of = f" of each of {tensor} tensor-parallel ranks" if tensor > 1 else ""
        raise ConfigError(
            f"{KEY} = {ranks} does not divide {heads} attention heads{of} (with {shared} of keys "
            f"and values), of which each rank computes as many; choose a divisor of {heads}, such "
            f"as {math.gcd(heads, ranks)}"
        )


def _by_document(
    core: Core, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents
) -> torch.Tensor:
    """Run ``core`` on each document of whole sequences, equal lengths in batches: [B, S, H, D]."""
    if not documents.packed:
        return core(q, k, v)
    rows, tokens = q.shape[0], q.shape[2]
    # [B x S, H, D]
    flat = [t.transpose(1, 2).reshape(rows * tokens, t.shape[1], -1) for t in (q, k, v)]
    places, by_length = _places(documents, rows, q.device)
    out = torch.cat([
        core(*(t[index].transpose(1, 2) for t in flat)).flatten(0, 1) for index in by_length
    ])  # fmt: skip
    whole = torch.empty_like(out).index_copy(0, places, out)
    return whole.view(rows, tokens, *out.shape[1:])


@functools.lru_cache(maxsize=4)  # called by every block of a forward
def _places(
    documents: Documents, rows: int, device: torch.device
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return the token indices of each document in ``rows`` x length, documents of equal length one
    after another: all of them, [rows x length], and by length, [documents, length] each.
    """
    with torch.inference_mode(False):  # autograd of a later forward may save these cached tensors
        indices = [
            torch.tensor(starts)[:, None] + torch.arange(length)
            for length, starts in documents.by_length(rows).items()
        ]
        whole = upload(torch.cat([tokens.flatten() for tokens in indices]), device)
        parts = whole.split([tokens.numel() for tokens in indices])
        return whole, tuple(part.view_as(tokens) for part, tokens in zip(parts, indices))


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


class DistributedAttention(nn.Module):
    """Run ``local_attention`` over the tokens of all sequence-parallel ranks, on this rank's share
    of the heads (Ulysses, arXiv 2309.14509). Its forward is collective over these ranks.

    Args:
        local_attention: called with query, key and value of whole sequences, and the further
            arguments of the forward.
        sequence_process_group: the group of ``hf_zero.sequence_parallel(size)``, called before.
            None: that of the job; without sequence parallelism nothing is exchanged.
        scatter_idx: the dimension of the heads.
        gather_idx: the dimension of the tokens: 0 of [tokens, batch, heads, D], 1 of [batch,
            tokens, heads, D].
        sp_stream: accepted; collectives have streams of their own.

    Raises:
        ConfigError: another group, or a job whose ranks form rings.
    """

    def __init__(
        self,
        local_attention: Callable[..., torch.Tensor],
        sequence_process_group: ProcessGroup | None = None,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: object = None,
    ):
        super().__init__()
        self.local_attn = local_attention
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx
        groups = get_parallel()
        if groups is not None and groups.dims.context > 1:
            raise ConfigError(
                f"DistributedAttention needs the tokens of whole sequences, and with {CONTEXT} = "
                f"{groups.dims.context} they stay on the ranks of a ring; use a model of "
                f"transformers, or {KEY} alone"
            )
        ours = None if groups is None else groups.group(AXIS)
        other = sequence_process_group not in (None, ours)
        if other and get_world_size(sequence_process_group) > 1:
            raise ConfigError(
                "DistributedAttention(sequence_process_group=...) is not the group of this job's "
                "sequence-parallel ranks; call hf_zero.sequence_parallel(size), which makes it, "
                "and pass its .group, or None"
            )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: int | None = None,
        rotary_pos_emb: object = None,
        *args: object,
        **kwargs: object,
    ) -> torch.Tensor:
        """Return the attention output for this rank's tokens, laid out like ``query``;
        ``local_attention`` may merge the last two dimensions of its output, heads and D.

        ``batch_dim_idx`` is accepted: the batch is the dimension that is neither heads nor tokens.
        Key and value heads that do not divide among the ranks are repeated. Raises ConfigError for
        query heads that do not, for queries of other than four dimensions, and for
        ``rotary_pos_emb``.
        """
        if rotary_pos_emb is not None:
            raise ConfigError(
                "DistributedAttention was given rotary_pos_emb; rotate queries and keys before, "
                "by the positions that this rank's tokens have in the whole sequence"
            )
        if query.dim() != 4:
            raise ConfigError(
                f"DistributedAttention was given queries of {query.dim()} dimensions "
                f"{tuple(query.shape)}; make them four: the tokens, the batch, the heads, and D"
            )
        groups = get_parallel()
        if groups is None or groups.along(AXIS).size == 1:
            return self.local_attn(query, key, value, *args, **kwargs)
        dim = groups.along(AXIS)
        places = self.scatter_idx, self.gather_idx
        heads = spread_heads(
            dim, *(tensor.movedim(places, (1, 2)) for tensor in (query, key, value))
        )
        whole = self.local_attn(*(head.movedim((1, 2), places) for head in heads), *args, **kwargs)
        return self._tokens_of_rank(dim, whole)

    def _tokens_of_rank(self, dim: MeshDim, whole: torch.Tensor) -> torch.Tensor:
        """Convert [S, batch, H / ranks, D], or with the last two merged, to this rank's s tokens of
        all heads.
        """
        joined = whole.dim() == 3
        places = self.scatter_idx, self.gather_idx
        # treat merged heads and D as heads of one element
        four = (whole.unsqueeze(-1) if joined else whole).movedim(places, (1, 2))
        local = gather_heads(dim, "attention", four).movedim((1, 2), places)
        return local.squeeze(-1) if joined else local
