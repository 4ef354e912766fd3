"""Exchanges of bytes of which few ranks have far more than the others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hf_zero.distributed import world_group
from hf_zero.distributed.world_group import BROADCAST, common_size, get_world_group
from tests.helpers.ranks import run_ranks


def test_what_all_send_together_is_what_costs_least() -> None:
    for sizes, common in (
        ([0, 0], 0),
        ([100, 100, 100], 100),
        ([90, 100, 80], 100),  # less padding than one more collective costs
        ([5 << 20, 100, 100], 100),
        ([5 << 20, *[50_000] * 1023], 50_000),
        ([1 << 20, 0, 0, 0], 0),
    ):
        assert common_size(sizes) == common


def test_each_rank_has_the_bytes_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[int] = []
    gather, broadcast = dist.all_gather, dist.broadcast

    def gathered(parts: list[torch.Tensor], *how: object) -> None:
        received.append(sum(part.numel() for part in parts))
        gather(parts, *how)

    def sent(part: torch.Tensor, *how: object) -> None:
        received.append(part.numel())
        broadcast(part, *how)

    monkeypatch.setattr(world_group.dist, "all_gather", gathered)
    monkeypatch.setattr(world_group.dist, "broadcast", sent)
    for sizes in ([3, 2 * BROADCAST, 0], [0, 0, 0], [5, 5, 5], [0, 0, 1 << 20]):
        received.clear()
        values = [bytes([rank + 1]) * size for rank, size in enumerate(sizes)]
        got = run_ranks(
            3, lambda rank, values=values: get_world_group().all_gather_bytes(values[rank])
        )
        assert got == [values] * 3
        assert sum(received) <= 3 * (sum(sizes) + 3 * BROADCAST)
