"""Going on after a pass that an exception broke: ranks are threads that share a store."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from hf_zero.distributed import watchdog as watching
from hf_zero.distributed.collective_log import CollectiveLog, PendingCollective
from hf_zero.distributed.rank_status import RankStatus
from hf_zero.distributed.recovery import PassTracker, RecoveryBoard
from hf_zero.distributed.watchdog import Watchdog
from hf_zero.errors import RankMismatchError


def go_on(alike: bool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Rank 0 goes on after an exception; rank 1 as well, or with what follows on it."""
    monkeypatch.setattr(watching, "LOOK_SECONDS", 0.02)
    store, answers = dist.HashStore(), ["hangs", "hangs"]

    def run(rank: int) -> None:
        status, board = RankStatus(store, rank, 2), RecoveryBoard(store, rank)
        watchdog = Watchdog(rank_status=status, poll=board.answer_statements)
        log = status.register(CollectiveLog("gathers", (0, 1), 20.0))
        passes = PassTracker("engine", rank, 2, {"gathers": log}, watchdog, 20.0, board)
        passes.begin("forward", "f")
        log.issue("gather 0")
        passes.broke() if alike or rank == 0 else passes.end()
        try:
            passes.begin("forward", "f" if alike or rank == 0 else "g")
            if not alike:
                log.issue("gather 1")
            limit = time.monotonic() + 20
            with watchdog.watching(PendingCollective("the other rank")):
                while not alike and time.monotonic() < limit:
                    watchdog.check()
                    time.sleep(0.01)
            answers[rank] = "went on"
        except RankMismatchError as error:
            answers[rank] = str(error)
        finally:
            watchdog.close()
            watching._watches.discard(watchdog)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return answers


def test_ranks_that_go_on_alike_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert go_on(True, monkeypatch) == ["went on", "went on"]


def test_ranks_that_go_on_with_different_passes_raise_on_both(
    monkeypatch: pytest.MonkeyPatch, heard: list[str]
) -> None:
    for answer in go_on(False, monkeypatch):
        assert "rank 0 goes on with another forward after an exception" in answer
        assert "rank 1 has issued gather 1" in answer
