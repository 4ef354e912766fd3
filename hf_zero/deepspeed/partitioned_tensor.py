"""Tensors in equal parts among the ranks of a group, as ``deepspeed.runtime.utils`` has them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from hf_zero.deepspeed import comm
from hf_zero.distributed.process_group import dist
from hf_zero.errors import PartitionError
from hf_zero.parallel.pipeline.stage_bounds import partition_uniform

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class PartitionedTensor:
    """The part of ``tensor`` (any shape, equal on all ranks of ``group``) that this rank keeps: a
    1-D copy. Parts differ by one element at most.
    """

    def __init__(
        self, tensor: torch.Tensor, group: ProcessGroup | None, partition_meta: object = None
    ) -> None:
        self._hold(list(tensor.shape), group, tensor.device)
        flat = tensor.detach().reshape(-1)
        self.local_data = flat[self.partition[self.rank] : self.partition[self.rank + 1]].clone()

    def _hold(self, size: list[int], group: ProcessGroup | None, device: torch.device) -> None:
        self.group, self.orig_size, self.orig_device = group, size, device
        self.num_parts, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.partition = partition_uniform(torch.Size(size).numel(), self.num_parts)

    @classmethod
    def from_meta(
        cls,
        meta: torch.Tensor,
        local_part: torch.Tensor,
        group: ProcessGroup | None,
        device: torch.device | None = None,
    ) -> PartitionedTensor:
        """Rebuild a tensor from :meth:`to_meta` and :meth:`data` of another rank in this place."""
        tensor = cls.__new__(cls)
        numbers = meta.tolist()
        size = numbers[1 : 1 + numbers[0]]
        tensor._hold(size, group, local_part.device if device is None else device)
        tensor.local_data = local_part.detach()
        return tensor

    def to_meta(self) -> torch.Tensor:
        """Return its shape and parts: [dimensions, sizes, number of parts, this part, bounds]."""
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank]
        return torch.tensor([*numbers, *self.partition], device=self.orig_device)

    def full(self, device: torch.device | None = None) -> torch.Tensor:
        """Return the whole tensor (collective)."""
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
    tensors: Sequence[torch.Tensor], group: ProcessGroup | None = None
) -> list[torch.Tensor]:
    """Return this rank's part, 1-D, of the mean over ``group`` of each of ``tensors``, in one
    message (collective). Parts have ``ceil(numel / ranks)`` elements, the last ones fewer or none.
    Raises PartitionError for tensors of several dtypes.
    """
    if not tensors:
        return []
    if len(dtypes := {tensor.dtype for tensor in tensors}) > 1:
        raise PartitionError(
            f"reduce_scatter_coalesced got tensors of {', '.join(sorted(map(str, dtypes)))}, and "
            "one message has one dtype; call it once for each"
        )
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = [-(-tensor.numel() // ranks) for tensor in tensors]
    sent = tensors[0].new_zeros(ranks, sum(sizes))  # [receiving rank, its parts]
    places = [sum(sizes[:at]) for at in range(len(sizes) + 1)]
    for tensor, (start, stop) in zip(tensors, pairwise(places)):
        flat = tensor.reshape(-1) / ranks
        for to, part in enumerate(flat.split(stop - start)):
            sent[to, start : start + part.numel()] = part
    received = sent.new_empty(sum(sizes))
    comm.reduce_scatter_tensor(received, sent.view(-1), group=group)
    parts = received.split(sizes)
    lengths = [max(0, min(t.numel() - rank * size, size)) for t, size in zip(tensors, sizes)]
    return [part[:numel] for part, numel in zip(parts, lengths)]
