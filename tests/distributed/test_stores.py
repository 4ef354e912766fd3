"""Stores that may never answer; agreement, fetches and messages through a store, on ranks that are
threads, with the requests that they cost.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import hf_zero
from hf_zero.distributed import rank_status, shard_fetches
from hf_zero.distributed import store as job_store
from hf_zero.distributed.consensus import Consensus
from hf_zero.distributed.hang_detection import Watchdog
from hf_zero.distributed.rank_status import PostedStatus
from hf_zero.distributed.store import RollCall, StoreMessages, StoreSilent, TimeoutStore
from hf_zero.errors import LaunchError, RankMismatchError
from hf_zero.launch.hosts import free_port


class Silent:
    """A store behind a cable that was cut."""

    def __init__(self) -> None:
        self.watching = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.watching.wait(60)
        return True


def test_a_store_that_does_not_answer_is_given_up_once() -> None:
    silent = Silent()
    store = TimeoutStore(silent, 0.05)
    with pytest.raises(RuntimeError, match=r"has not answered for 0\.05 s"):
        store.check(["a"])
    for call in (lambda: store.set("a", "x"), lambda: store.add("n", 1), lambda: store.get("a")):
        with pytest.raises(RuntimeError, match="does not answer"):
            call()
    silent.watching.set()


def test_a_store_whose_process_was_stopped_is_asked_again() -> None:
    """A wait ends by it only once it has not answered for long; what was posted arrives."""
    silent, posted = Silent(), list[str]()
    silent.set = lambda key, value: posted.append(key)  # type: ignore[attr-defined]
    store = TimeoutStore(silent, 0.05, patience=60.0)
    for call in (lambda: store.check(["a"]), lambda: store.set("a", "x")):
        with pytest.raises(StoreSilent, match="has not answered for"):
            call()
    silent.watching.set()
    limit = time.monotonic() + 60.0
    while not posted and time.monotonic() < limit:
        time.sleep(0.01)
    assert posted == ["a"] and store.check(["a"])
    lost = TimeoutStore(Silent(), 0.05, patience=0.09)
    for error in (StoreSilent, RuntimeError):
        with pytest.raises(error) as raised:
            lost.check(["a"])
        assert raised.type is error
        time.sleep(0.05)


def test_a_host_that_ended_before_the_connection_does_not_block_its_client() -> None:
    """torch retries a connection for as long as its timeout; the rank waits on a thread for it."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, timeout=timedelta(seconds=15))
    del host
    store = TimeoutStore(client, 0.05)
    with pytest.raises(RuntimeError, match=r"has not answered for 0\.05 s"):
        store.add("a", 1)
    with pytest.raises(RuntimeError, match="does not answer"):
        store.add("a", 1)


class Locking:
    """It keeps the interpreter's lock for longer than an answer may take."""

    def check(self, keys: list[str]) -> bool:
        ctypes.PyDLL(None).usleep(600_000)
        return True


def test_a_process_that_stood_still_has_not_lost_its_store() -> None:
    store = TimeoutStore(Locking(), 0.5)
    assert store.check(["a"]) and store.check(["a"])


def test_a_word_that_never_comes_is_an_error_at_the_timeout() -> None:
    said = r"rank 3 did not report .*no message of it for 0.05 s \(the timeout"
    with pytest.raises(RankMismatchError, match=said):
        StoreMessages(dist.HashStore(), 0, 0.05, lambda ranks: {}).receive("wrote", 1, 3)


class Lost:
    def add(self, key: str, amount: int) -> int:
        if key == "opened":
            return 1
        raise RuntimeError("Connection reset by peer")


def test_a_store_that_is_gone_is_told() -> None:
    with pytest.raises(RuntimeError, match="Connection reset"):
        TimeoutStore(Lost(), 60.0).add("a", 1)
    with pytest.raises(RuntimeError, match="Connection reset"):
        StoreMessages(Lost(), 0, 60.0, lambda ranks: {}).receive("wrote", 1, 1)


def test_a_store_of_the_launcher_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks wait for the agent's store as long as for each other."""
    port = free_port()
    place = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    begun = time.monotonic()
    with pytest.raises(LaunchError, match=f"at 127.0.0.1:{port}: nothing has answered for 1 s"):
        hf_zero.init_distributed(timeout=1.0)
    assert time.monotonic() - begun >= 1.0


def on_threads(calls: Sequence[Callable[[], Any]], timeout: float = 120.0) -> list[Any]:
    """The results of ``calls``, on a thread each; fails where one hangs."""
    answers: list[Any] = [None] * len(calls)

    def run(at: int) -> None:
        answers[at] = calls[at]()

    threads = [threading.Thread(target=run, args=(at,), daemon=True) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
        assert not thread.is_alive(), "a rank hangs"
    return answers


def say(proposal: tuple[int, int]) -> str:
    return f"gather of unit {proposal[1]}"


def together(
    world: int,
    fn: Callable[[Consensus, int], Any],
    timeout: float = 60.0,
    absent: tuple[int, ...] = (),
) -> list[Any]:
    """``fn(agreement, rank)`` on a thread each, in rank order; what a rank raises is its answer."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        if rank in absent:
            return None
        try:
            return fn(Consensus(store, rank, range(world), timeout), rank)
        except RankMismatchError as error:
            return error

    return on_threads([partial(run, rank) for rank in range(world)])


def test_different_passes_raise_on_all_ranks_and_name_each() -> None:
    def run(consensus: Consensus, rank: int) -> Any:
        where = "backward 'b'" if rank == 2 else "forward 'f'"
        return consensus.gathers.agree(where, (1, rank), say)

    for error in together(4, run):
        assert isinstance(error, RankMismatchError)
        for rank in range(4):
            assert f"rank {rank}: {'backward' if rank == 2 else 'forward'}" in str(error)
        assert "same parts of the model in the same order" in str(error)


class SilentStore:
    """A store in which nobody else ever writes; waiting on it moves the clock."""

    def __init__(self) -> None:
        self.now, self._store = 0.0, dist.HashStore()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def sleep(self, seconds: float) -> None:
        assert 0 < seconds <= job_store.LAST_PAUSE
        self.now += seconds


def test_a_rank_that_is_late_is_named_each_minute_until_the_timeout(
    heard: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SilentStore()
    RollCall(store, "0", 3).enter(1)
    monkeypatch.setattr(job_store, "time", SimpleNamespace(monotonic=lambda: store.now))
    monkeypatch.setattr(Watchdog, "sleep", lambda watchdog, seconds: store.sleep(seconds))
    with pytest.raises(RankMismatchError) as raised:
        Consensus(store, 0, range(3), 150.0).gathers.agree("forward", (1, 4), say)
    text = str(raised.value)
    assert text.startswith("rank 0 has waited 150 s for ranks 2 to join the gather of unit 4 in fo")
    assert "never came" in text and "Do all ranks call" in text
    assert heard == [
        f"rank 0 has waited {waited} s for ranks 2 to join the gather of unit 4 in forward"
        for waited in (60, 120)
    ]


class Chunks:
    """A rank's chunk of each unit: what it serves."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def of(self, unit: int, step: int = 0) -> bytes:
        return bytes((self.rank * 50 + unit * 7 + at) % 256 for at in range(self.size))


class Broken:
    def of(self, unit: int, step: int) -> bytes:
        raise ValueError("no such shard")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_fetches, "PART", 16)
    monkeypatch.setattr(shard_fetches, "POLL_SECONDS", 0.002)


@pytest.fixture
def trio(quick: None) -> Iterator[tuple[list[Consensus], list[Chunks], Any]]:
    """Three ranks that serve 37 bytes a unit: three parts, the last one short."""
    store = dist.HashStore()
    agreements = [Consensus(store, rank, range(3), 60.0) for rank in range(3)]
    chunks = [Chunks(rank, 37) for rank in range(3)]
    for consensus, chunk in zip(agreements, chunks):
        consensus.fetches.serve(chunk.of)
    threads = [each.fetches.serving.thread for each in agreements]
    del consensus, chunk  # what is named here would be kept alive
    yield agreements, chunks, store
    agreements.clear()
    for thread in threads:
        assert thread is not None
        thread.join(timeout=60)
        assert not thread.is_alive(), "a serving thread outlives its engine"


def test_a_chunk_that_cannot_be_read_is_an_error_of_the_rank_that_asks(
    quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Those who have heard of the fetch are told."""
    store, whole, broken = dist.HashStore(), Chunks(2, 4), Broken()
    asking, breaking, listening = (Consensus(store, rank, range(3), 60.0) for rank in range(3))
    listening.fetches.serve(whole.of)
    breaking.fetches.serve(broken.of)
    for _ in range(2):  # the thread lives on
        said = r"rank 1 could not serve layer\.3: ValueError: no such shard; its log says where"
        with pytest.raises(RankMismatchError, match=said):
            asking.fetches.fetch(3, "layer.3", [2, 1], 4)
    said = r"rank 0 could not make the others serve layer\.3: rank 1 could not serve layer\.3: Val"
    with pytest.raises(RankMismatchError, match=said):
        breaking.steps.end_step()
    for each in (breaking, listening):
        each.close()
        thread = each.fetches.serving.thread
        assert thread is not None
        thread.join(timeout=60)
        assert not thread.is_alive()


def test_a_rank_that_has_closed_is_named_at_once(trio: Any) -> None:
    agreements, _, _ = trio
    agreements[1].close()
    agreements[1].fetches.serving.thread.join(timeout=60)  # it may be reading a request
    said = r"rank 0 needs all ranks to serve layer\.2, but rank 1 has destroyed its engine or ended"
    with pytest.raises(RankMismatchError, match=said):
        agreements[0].fetches.fetch(2, "layer.2", [1, 2], 37)
    said = "rank 2 needs all ranks to join the gather of unit 3 in x, but rank 1 has"
    with pytest.raises(RankMismatchError, match=said):
        RollCall(agreements[0].gathers._store, "0", 3).enter(0, "x|1|3|0|0")
        agreements[2].gathers.agree("x", (1, 3), say)


def test_serving_ends_with_what_is_served(quick: None) -> None:
    """One thread serves, which must not keep an engine alive, nor outlive it."""
    consensus, chunks = Consensus(dist.HashStore(), 0, range(2), 5.0), Chunks(0, 4)
    consensus.fetches.serve(chunks.of)
    thread, gone = consensus.fetches.serving.thread, weakref.ref(chunks)
    assert thread is not None and thread.daemon
    consensus.fetches.serve(chunks.of)
    assert consensus.fetches.serving.thread is thread
    del chunks
    thread.join(timeout=60)
    assert not thread.is_alive() and gone() is None


class Held:
    """A store in which a ``set`` waits to be let go."""

    def __init__(self) -> None:
        self._store, self.reached, self.go = dist.HashStore(), threading.Event(), threading.Event()

    def clone(self) -> Held:
        return self

    def set(self, key: str, value: str) -> None:
        self.reached.set()
        self.go.wait(60)
        self._store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_thread_of_an_engine_that_is_gone_is_awaited_at_exit(quick: None) -> None:
    """It would return from the store into an interpreter that shuts down, which aborts."""
    store, chunks = Held(), Chunks(0, 4)
    events: Any = SimpleNamespace(asked=set())
    fetches = shard_fetches.ShardFetches(store, 0, range(1), events, events, list)  # type: ignore
    fetches.serve(chunks.of)
    thread = fetches.serving.thread
    assert thread is not None
    del fetches
    assert store.reached.wait(60)
    awaited = [serving.thread for serving in shard_fetches._serving]
    store.go.set()
    assert thread in awaited
    thread.join(60)


def test_ranks_of_unknown_hosts_are_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(rank_status, "_identity", lambda process: f"? {process} ?")
    here, _ = (PostedStatus(store, rank, 2) for rank in range(2))
    here.read()
    assert here._identities.keys() == {0, 1} and not here._neighbors
    assert here.failure_cause(0.0) is None and here.all_live


def test_a_rank_that_is_gone_is_looked_for_once_more() -> None:
    """The last message of a rank may arrive between the poll of the store and the news of its
    exit.
    """
    store = dist.HashStore()
    leaving = StoreMessages(store, 1, 60.0, lambda ranks: {})

    def gone(ranks: Sequence[int]) -> dict[int, str]:
        leaving.send("wrote", 1, "done")
        return {1: "rank 1 has ended"}

    assert StoreMessages(store, 0, 60.0, gone).receive("wrote", 1, 1) == "done"
    said = "rank 1 did not report the result of its write: rank 1 has ended; its own output says"
    with pytest.raises(RankMismatchError, match=said):
        StoreMessages(store, 0, 60.0, lambda ranks: {1: "rank 1 has ended"}).receive("wrote", 2, 1)
