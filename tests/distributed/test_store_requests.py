"""Requests to the store of many ranks, counted: while they wait, agree, save, and when one dies."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hf_zero.distributed import rank_requests, rank_status
from hf_zero.distributed import watchdog as watching
from hf_zero.distributed.collective_log import CollectiveLog
from hf_zero.distributed.consensus import Consensus
from hf_zero.distributed.rank_status import RankStatus
from hf_zero.distributed.recovery import RecoveryBoard
from hf_zero.distributed.watchdog import Watchdog
from tests.distributed.threads import on_threads

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
    """A rank of a host, whose waits are looked at when the test says."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self.store = Counted(store)
        with pytest.MonkeyPatch.context() as patch:
            host = f"host{rank // ON_A_HOST}."
            patch.setattr(rank_status, "_identity", lambda _: host + find_identity(os.getpid()))
            self.status = RankStatus(self.store, rank, world)
        board = RecoveryBoard(self.store, rank)  # type: ignore[arg-type]
        self.watchdog = Watchdog(rank_status=self.status, poll=board.answer_statements)
        self.watchdog.started = True  # the test looks, not a thread
        self.log = self.status.register(CollectiveLog("gathers", range(world), 1e6, native=False))

    def look(self) -> str:
        self.watchdog.check_current_wait()
        self.watchdog.poll()
        return self.watchdog.verdict

    def requests(self) -> int:
        """Return the requests since the last call."""
        asked = self.store.asked.total()
        self.store.asked.clear()
        return asked


def test_a_waiting_rank_asks_the_store_less_than_once_a_second(
    monkeypatch: pytest.MonkeyPatch, heard: list[str]
) -> None:
    """For a minute, one rank late; nothing is concluded, and the late one asks nothing."""
    clock, store, world = SimpleNamespace(now=1000.0), dist.HashStore(), MANY // 2
    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: clock.now))
    ranks = [Rank(store, rank, world) for rank in range(world)]

    def look(seconds: float) -> None:
        """Let the ranks look, as their threads would, for ``seconds``."""
        end = clock.now + seconds
        while clock.now < end:
            clock.now += watching.LOOK_SECONDS / 4
            assert {rank.look() for rank in ranks} == {""}

    def wait() -> None:
        for rank in ranks[:-1]:
            rank.watchdog.current = (rank.log.issue("gather of x"), clock.now)

    wait()
    look(10)
    for rank in ranks:
        rank.requests()
    look(60)
    *asked, late = [rank.requests() for rank in ranks]
    assert all(25 <= each <= 40 for each in asked) and late == 0
    # the first seconds of a wait: the posts, one digest of all, and its readers
    wait()
    look(5)
    assert max(rank.requests() for rank in ranks) <= 12
    for rank in ranks:
        watching._watches.discard(rank.watchdog)


def test_ranks_of_unknown_hosts_are_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(rank_status, "_identity", lambda process: f"? {process} ?")
    here, _ = (RankStatus(store, rank, 2) for rank in range(2))
    here.look()
    assert here._identities.keys() == {0, 1} and not here._neighbours
    assert here.failure_cause(0.0) is None and not here.troubled


def test_an_agreement_costs_each_rank_the_same_whatever_the_world() -> None:
    store = dist.HashStore()
    clients = [Counted(store) for _ in range(MANY)]
    ranks = [Consensus(client, at, range(MANY), 60.0) for at, client in enumerate(clients)]

    def agree(rank: Consensus) -> None:
        for unit in range(3):
            rank.gathers.agree("forward", (1, unit), str)

    on_threads([partial(agree, rank) for rank in ranks])
    for client in clients:
        polls = client.asked.pop("check")
        assert polls >= 3
        # the last to come reads the list, publishes the outcome, and deletes the last one
        assert 3 * 3 <= client.asked.total() <= 3 * (3 + 2 + 3)


class Chunk:
    def of(self, unit: int, epoch: int) -> bytes:
        return b"abc"


def test_ranks_that_serve_ask_nothing_until_their_bells_ring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_requests, "IDLE_SECONDS", 0.001)
    store = dist.HashStore()
    chunk, clients = Chunk(), [Counted(store) for _ in range(MANY)]
    ranks = [Consensus(client, at, range(MANY), 60.0) for at, client in enumerate(clients)]
    for rank in ranks:
        rank.fetches.serve(chunk.of)
    assert ranks[0].fetches.fetch(1, "layer.1", [3], 3) == {3: b"abc"}
    asked = clients[0].asked.copy()
    polls = asked.pop("check")
    assert polls and asked["multi_set"] == 1 and asked.total() <= 20, "not one for each rank"
    while any(client.asked["wait"] < 2 for client in clients[1:]):
        time.sleep(0.001)  # until the bells listen again
    before = [client.asked.total() for client in clients]
    time.sleep(0.1)  # a hundred checks whether the engine still exists
    assert [client.asked.total() for client in clients] == before
    ranks[0].steps.request_stop()
    assert [rank.steps.end_step() for rank in ranks] == [True] * MANY, "of the fetch"
    assert all(rank.steps.stopped for rank in ranks)
    threads = [rank.fetches.serving.thread for rank in ranks]
    for rank in ranks:
        rank.close()
    for thread in threads:
        assert thread is not None
        thread.join(60)
        assert not thread.is_alive()


class Silent:
    """A store whose waits never end."""

    def wait(self, *_: object) -> None:
        threading.Event().wait()

    def set(self, *_: object) -> None:
        return None

    def check(self, _: object) -> bool:
        return False

    def add(self, *_: object) -> int:
        return 0


def test_a_rank_waits_for_the_end_of_its_thread_and_of_what_that_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that returns from the store as the interpreter shuts down aborts the process."""
    assert rank_requests.BELL_SECONDS < rank_requests.JOIN_SECONDS
    monkeypatch.setattr(rank_requests, "JOIN_SECONDS", 1.0)
    monkeypatch.setattr(rank_requests, "BELL_SECONDS", 0.3)
    published: list[float] = []

    def publish(store: object, rank: int) -> None:
        time.sleep(0.3)
        published.append(time.monotonic())

    monkeypatch.setattr(rank_requests, "publish_closed", publish)
    serving = rank_requests.Serving()
    first = serving.rung

    class Owner:
        closed, own_requests = False, set[int]()

        def read(self) -> None:
            return None

    owner = Owner()
    owner.serving = serving  # type: ignore[attr-defined]
    arguments: Any = (weakref.ref(owner), Silent(), 0, weakref.WeakMethod(owner.read), lambda: None)
    serving.thread = threading.Thread(target=rank_requests._serve, args=arguments, daemon=True)
    serving.thread.start()
    while serving.rung is first:  # it has not begun
        time.sleep(0.01)
    serving.end()
    assert published and not serving.thread.is_alive()
