"""Requests to the store of many ranks, counted: while they wait, and when a save is committed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hf_zero.checkpoint import save_job
from hf_zero.distributed import rank_status
from hf_zero.distributed import watchdog as watching
from hf_zero.distributed.collective_log import CollectiveLog
from hf_zero.distributed.rank_status import PostedStatus
from hf_zero.distributed.recovery import RecoveryBoard
from hf_zero.distributed.store import StoreMessages
from hf_zero.distributed.watchdog import PollingWatchdog
from hf_zero.planning.simulation.store_load import store_load

MANY, ON_A_HOST = 64, 8
find_identity = rank_status._identity


class Counted:
    """A client of a store that counts its requests by name."""

    def __init__(self, store: Any) -> None:
        self._store, self.asked = store, Counter[str]()

    def clone(self) -> Counted:
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._store, name)

        def counted(*args: Any) -> Any:
            self.asked[name] += 1
            return call(*args)

        return counted


class Rank:
    """A rank of a host, whose waits are polled when the test says."""

    def __init__(self, store: Any, rank: int, world: int, patch: pytest.MonkeyPatch) -> None:
        self.store = Counted(store)
        host = f"host{rank // ON_A_HOST}."
        patch.setattr(rank_status, "_identity", lambda process: host + find_identity(process))
        self.status = PostedStatus(self.store, rank, world)
        board = RecoveryBoard(self.store, rank)  # type: ignore[arg-type]
        self.watchdog = PollingWatchdog(rank_status=self.status, answer=board.answer_statements)
        self.watchdog.started = True  # the test polls, not a thread
        self.log = self.status.register(
            CollectiveLog("gathers", range(world), 1e6, reports_dead_peers=False)
        )

    def poll(self) -> None:
        self.watchdog.check_current_wait()
        self.watchdog.answer_others()

    def requests(self) -> int:
        """Return the number of requests since the last call."""
        asked = self.store.asked.total()
        self.store.asked.clear()
        return asked


def test_a_waiting_rank_asks_the_store_less_than_once_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For a minute, one rank late; nothing is concluded, and the late one asks nothing."""
    clock, store = SimpleNamespace(now=1000.0), dist.HashStore()
    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: clock.now))
    ranks = [Rank(store, rank, MANY // 2, monkeypatch) for rank in range(MANY // 2)]
    monkeypatch.setattr(rank_status, "_identity", find_identity)
    *waiting, late = ranks

    def wait(seconds: float) -> None:
        """Let all ranks poll, as their threads would, for ``seconds``."""
        end = clock.now + seconds
        while clock.now < end:
            clock.now += watching.POLL_SECONDS / 4
            for rank in ranks:
                rank.poll()
        assert {rank.watchdog.verdict for rank in ranks} == {""}

    for rank in waiting:
        rank.watchdog.current = (rank.log.issue("gather of x"), clock.now)
    wait(10)
    for rank in ranks:
        rank.requests()
    wait(60)
    asked = [rank.requests() for rank in waiting]
    assert all(25 <= each <= 40 for each in asked) and late.requests() == 0
    # the first seconds of a wait: the posts, one digest of all, and its readers
    for rank in waiting:
        rank.watchdog.current = (rank.log.issue("gather of x"), clock.now)
    wait(5)
    assert max(rank.requests() for rank in ranks) <= 12
    for rank in ranks:
        watching.watchdogs.discard(rank.watchdog)


def test_the_rank_that_commits_reads_many_outcomes_by_one_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.HashStore()
    clients = [Counted(dist.PrefixStore("saves", store)) for _ in range(MANY)]
    mails = [StoreMessages(each, at, 60.0, lambda ranks: {}) for at, each in enumerate(clients)]
    for number in (1, 2):
        exchanges = [
            save_job.ByMessages(mail, number, SimpleNamespace(rank=rank, world=MANY))  # type: ignore
            for rank, mail in enumerate(mails)
        ]
        for client in clients:
            client.asked.clear()
        for rank, exchange in enumerate(exchanges[1:], 1):
            assert exchange.gather(save_job.Outcome(None, f"error {rank}")) == []
        outcomes = exchanges[0].gather(save_job.Outcome(None, "error 0"))
        assert [each.error for each in outcomes] == [f"error {rank}" for rank in range(MANY)]
        assert exchanges[0].broadcast("failed") == "failed"
        assert [each.broadcast("") for each in exchanges[1:]] == ["failed"] * (MANY - 1)
        assert clients[0].asked.total() == 1 + 2 + 2 + 2, "count, outcomes, old counts, verdict"
        assert {client.asked.total() for client in clients[1:]} == {4}
        assert sum(client.asked.total() for client in clients) == store_load(MANY, None).save
    kept = {key for key in store.list_keys() if "/n" in key}
    assert len(kept) == 1, "counts of older saves are deleted"
    assert json.loads(mails[5].receive("verdict", 2, 0)) == "failed"
