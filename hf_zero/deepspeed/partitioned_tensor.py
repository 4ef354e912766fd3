"""Tensors in equal parts, one on each rank of a group: ``PartitionedTensor`` of
``deepspeed.runtime.utils``, and ``reduce_scatter_coalesced``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from hf_zero.deepspeed import comm
from hf_zero.distributed.process_group import dist
from hf_zero.parallel.pipeline.partition import partition_uniform


class PartitionedTensor:
    """The part of ``tensor`` (any shape, the same on all ranks of ``group``) that this rank keeps:
    a 1-D copy. Parts differ by one element at most.
    """

    def __init__(self, tensor: torch.Tensor, group: Any, partition_meta: Any = None) -> None:
        self._hold(list(tensor.shape), group, tensor.device)
        flat = tensor.detach().reshape(-1)
        self.local_data = flat[self.partition[self.rank] : self.partition[self.rank + 1]].clone()

    def _hold(self, size: list[int], group: Any, device: Any) -> None:
        self.group, self.orig_size, self.orig_device = group, size, device
        self.num_parts, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.partition = partition_uniform(torch.Size(size).numel(), self.num_parts)

    @classmethod
    def from_meta(
        cls, meta: torch.Tensor, local_part: torch.Tensor, group: Any, device: Any = None
    ) -> PartitionedTensor:
        """The tensor whose :meth:`to_meta` and :meth:`data` another rank of this place has sent."""
        made = cls.__new__(cls)
        numbers = meta.tolist()
        size = numbers[1 : 1 + numbers[0]]
        made._hold(size, group, local_part.device if device is None else device)
        made.local_data = local_part.detach()
        return made

    def to_meta(self) -> torch.Tensor:
        """Its shape and parts: [dimensions, sizes, number of parts, this part, bounds]."""
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank]
        return torch.tensor([*numbers, *self.partition], device=self.orig_device)

    def full(self, device: Any = None) -> torch.Tensor:
        """The whole tensor (collective)."""
        whole = torch.zeros(
            torch.Size(self.orig_size).numel(),
            dtype=self.local_data.dtype,
            device=self.orig_device if device is None else device,
        )
        whole[self.partition[self.rank] : self.partition[self.rank + 1]] = self.local_data
        for part, (start, stop) in enumerate(pairwise(self.partition)):
            dist.broadcast(whole[start:stop], group=self.group, group_src=part)
        return whole.view(self.orig_size)

    def data(self) -> torch.Tensor:
        return self.local_data

    def local_size(self) -> torch.Size:
        return self.local_data.size()

    def full_size(self) -> list[int]:
        return self.orig_size


@torch.no_grad()
def reduce_scatter_coalesced(
    tensors: Sequence[torch.Tensor], group: Any = None
) -> list[torch.Tensor]:
    """This rank's part, 1-D, of the mean over ``group`` of each of ``tensors``, in one message
    (collective). Parts have ``ceil(numel / ranks)`` elements, the last ones fewer or none.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = [-(-tensor.numel() // ranks) for tensor in tensors]
    sent = tensors[0].new_zeros(ranks, sum(sizes))  # [rank that receives it, its parts]
    places = [sum(sizes[:at]) for at in range(len(sizes) + 1)]
    for tensor, (start, stop) in zip(tensors, pairwise(places)):
        flat = tensor.reshape(-1) / ranks
        for to, part in enumerate(flat.split(stop - start)):
            sent[to, start : start + part.numel()] = part
    own = sent.new_empty(sum(sizes))
    comm.reduce_scatter_tensor(own, sent.view(-1), group=group)
    parts = own.split(sizes)
    kept = [max(0, min(t.numel() - rank * size, size)) for t, size in zip(tensors, sizes)]
    return [part[:numel] for part, numel in zip(parts, kept)]
