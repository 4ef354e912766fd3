"""The harness itself: results in order, failures named, hangs ended, and the next run undisturbed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.helpers import ranks as harness
from tests.helpers.ranks import RankFailed, RanksHung, run_ranks


def total(rank: int, offset: int) -> float:
    value = torch.tensor([float(rank + offset)])
    dist.all_reduce(value)
    return float(value)


def test_results_come_in_rank_order_and_collectives_work():
    assert run_ranks(4, total, 1) == [10.0] * 4
    assert run_ranks(3, lambda rank: rank * rank) == [0, 1, 4]
    assert run_ranks(1, total, 5) == [5.0]


def test_a_failure_names_the_rank_and_stops_the_others():
    def fails(rank: int) -> None:
        if rank == 2:
            raise KeyError("lost key")
        total(rank, 0)

    with pytest.raises(RankFailed, match="rank 2 of 4 raised") as caught:
        run_ranks(4, fails, timeout=20)
    assert isinstance(caught.value.__cause__, KeyError)
    assert run_ranks(4, total, 0) == [6.0] * 4


def test_a_missing_collective_is_shown_not_waited_for(monkeypatch):
    monkeypatch.setattr(harness, "LINGER", 0.5)

    def hangs(rank: int) -> None:
        if rank != 1:
            total(rank, 0)

    with pytest.raises(RanksHung) as caught:
        run_ranks(3, hangs, timeout=20)
    assert "rank 1: returned" in str(caught.value)
    assert "rank 0: still running" in str(caught.value)
    assert "in total" in str(caught.value)
    assert run_ranks(3, total, 0) == [3.0] * 3


def test_a_rank_that_waits_on_the_store_is_abandoned(monkeypatch):
    monkeypatch.setattr(harness, "LINGER", 0.3)

    def waits(rank: int) -> None:
        if rank == 0:
            dist.distributed_c10d._get_default_store().get("never set")

    with pytest.raises(RanksHung, match="rank 0: still running"):
        run_ranks(2, waits, timeout=20)
    assert run_ranks(2, total, 0) == [1.0] * 2


def test_no_group_is_left_behind():
    run_ranks(2, total, 0)
    assert not dist.is_initialized()
