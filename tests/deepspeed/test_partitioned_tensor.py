"""Parts of tensors on ranks, under DeepSpeed's names: beside slices and means of whole tensors."""

from __future__ import annotations

from itertools import chain
from typing import Any

import deepspeed
import torch

from tests.helpers.cells import in_one_item
from tests.helpers.ranks import run_ranks


@in_one_item([(8, 3), (7, 5), (3,), (1,), ()])
def test_a_tensor_in_parts_is_put_together_again(shape: tuple[int, ...]) -> None:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def run(rank: int) -> list[int]:
        group = deepspeed.comm.get_world_group()
        part = deepspeed.runtime.utils.PartitionedTensor(whole, group)
        assert part.full_size() == list(shape) and part.local_size() == part.data().shape
        assert torch.equal(part.full(), whole)
        sent = part.to_meta()
        assert torch.equal(type(part).from_meta(sent, part.data(), group).full(), whole)
        return part.data().tolist()

    parts = run_ranks(3, run)
    assert [*chain(*parts)] == whole.flatten().tolist()
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@in_one_item([[(6,)], [(2, 3), (3,)], [(1,)], [(7,), (5, 2), (2,)]])
def test_means_in_parts(sizes: list[Any]) -> None:
    draw = torch.Generator().manual_seed(0)
    given = [[torch.randn(size, generator=draw) for size in sizes] for _ in range(2)]
    mean = [torch.stack(tensors).mean(0).flatten() for tensors in zip(*given)]

    def run(rank: int) -> list[torch.Tensor]:
        before = [tensor.clone() for tensor in given[rank]]
        parts = deepspeed.runtime.comm.coalesced_collectives.reduce_scatter_coalesced(given[rank])
        assert all(map(torch.equal, before, given[rank]))
        return parts

    first, second = run_ranks(2, run)
    for whole, *parts in zip(mean, first, second):
        assert len(parts[0]) == -(-len(whole) // 2)
        torch.testing.assert_close(torch.cat(parts), whole)
