"""Attention over sequences that are split among ranks: each rank computes some of the heads over
all tokens, or over those of a ring, and the outputs return to the ranks of their tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_zero.device.kinds import autocast_dtype
from hf_zero.device.pinned import upload
from hf_zero.distributed.collectives import MeshDim
from hf_zero.errors import ConfigError
from hf_zero.parallel.sequence.division import KEY, Division
from hf_zero.parallel.sequence.documents import Documents
from hf_zero.parallel.sequence.exchanges import gather_heads, scatter_heads
from hf_zero.parallel.sequence.ring import ring_attention

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
    out = torch.cat(
        [core(*(t[index].transpose(1, 2) for t in flat)).flatten(0, 1) for index in by_length]
    )
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
