"""The division of a sequence among the ranks that share it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

KEY, CONTEXT = "sequence_parallel_size", "context_parallel_size"
AXIS, RING, SEQUENCE_CONTEXT = "sequence", "context", "sequence_context"  # axes of ParallelDims


@dataclass(frozen=True)
class Division:
    """Parts of a sequence on ``context`` x ``sequence`` ranks, those of ``sequence`` neighbors.

    A ring of ``context`` ranks divides a sequence into 2 x ``context`` chunks, of which rank r has
    the chunks r and -1 - r: with causal attention all ranks have equally much to compute. The
    ``sequence`` ranks at one place of the ring divide the tokens of that place in order.
    """

    sequence: int = 1
    context: int = 1

    def __str__(self) -> str:
        """The keys and values of the configuration."""
        sizes = ((KEY, self.sequence), (CONTEXT, self.context))
        return " and ".join(f"{key} = {size}" for key, size in sizes if size > 1) or f"{KEY} = 1"

    @property
    def key(self) -> str:
        """The key of the configuration to name in an error."""
        return CONTEXT if self.context > 1 else KEY

    @property
    def ranks(self) -> int:
        """Number of ranks that share a sequence."""
        return self.sequence * self.context

    @property
    def multiple(self) -> int:
        """The number that must divide the length of a sequence."""
        return self.sequence if self.context == 1 else self.context * math.lcm(2, self.sequence)

    def part(self, whole: torch.Tensor, rank: int, dim: int = 1) -> torch.Tensor:
        """Return the tokens of ``rank``, one of :attr:`ranks`, along ``dim`` of ``whole``."""
        if self.context > 1:
            rank, ring_rank = divmod(rank, self.sequence)
            chunks = whole.chunk(2 * self.context, dim)
            both = torch.cat([chunks[rank], chunks[-1 - rank]], dim)
            return both.chunk(self.sequence, dim)[ring_rank]
        return whole.chunk(self.sequence, dim)[rank]

    def whole(self, parts: Sequence[torch.Tensor], dim: int = 1) -> torch.Tensor:
        """Join the ``parts`` of all ranks: the inverse of :meth:`part`."""
        joined = torch.cat(list(parts), dim)
        if self.context == 1:
            return joined
        chunks = joined.chunk(2 * self.context, dim)
        return torch.cat([*chunks[::2], *reversed(chunks[1::2])], dim)
