"""Agreement through a store: ranks are threads that share one; they settle gathers, and fetch
and serve chunks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hf_zero.distributed import rank_requests
from hf_zero.distributed import store as job_store
from hf_zero.distributed.consensus import Consensus
from hf_zero.distributed.store import RollCall
from hf_zero.distributed.watchdog import Watchdog
from hf_zero.errors import RankMismatchError
from tests.distributed.threads import Later, on_threads


def say(wish: tuple[int, int]) -> str:
    return f"gather of unit {wish[1]}"


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


def stepped(consensus: Consensus) -> bool:
    """A step of the optimizer: shards are written."""
    with consensus.fetches.writing():
        pass
    return consensus.steps.end_step()


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
    monkeypatch.setattr(rank_requests, "PART", 16)
    monkeypatch.setattr(rank_requests, "POLL_SECONDS", 0.002)


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


def test_a_unit_is_fetched_from_those_that_do_not_wait_for_it(trio: Any) -> None:
    agreements, chunks, store = trio
    for number, size in enumerate((0, 1, 15, 16, 17, 32, 37), 1):
        for chunk in chunks:
            chunk.size = size
        got = agreements[1].fetches.fetch(5, "layer.5", [0, 2], size)
        assert got == {peer: chunks[peer].of(5) for peer in (0, 2)}
        keys = [f"fetch/{number}/{part}/{peer}" for part in range(4) for peer in (0, 2)]
        assert not any(store.check([key]) for key in keys), "values are left in the store"
    del chunk


def test_a_request_that_must_wait_keeps_no_other_one_waiting(trio: Any) -> None:
    """Rank 0 is a step ahead and asks first; rank 1, which rank 2 needs before it can get there,
    asks second.
    """
    agreements, chunks, _ = trio
    assert not stepped(agreements[0])
    ahead = Later(partial(agreements[0].fetches.fetch, 4, "layer.4", [1, 2], 37))
    while not agreements[0].gathers._store.check(["fetch/n"]):
        ahead.waits(0.01)
    got = agreements[1].fetches.fetch(6, "layer.6", [0, 2], 37)
    assert got == {peer: chunks[peer].of(6) for peer in (0, 2)}
    assert ahead.waits(0.0)
    assert not stepped(agreements[1]) and not stepped(agreements[2])
    ahead.end()
    del ahead
    assert [consensus.steps.end_step() for consensus in agreements] == [True] * 3


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


def test_nobody_is_served_in_the_middle_of_a_write_or_before_it(trio: Any) -> None:
    """Ranks set a weight one after the other; the first asks for the second's part while that
    one is still at it.
    """
    agreements, chunks, _ = trio
    with agreements[0].fetches.writing():
        chunks[0].rank = 5
    asking = Later(partial(agreements[0].fetches.fetch, 4, "layer.4", [1, 2], 37))
    for consensus, chunk in zip(agreements[1:], chunks[1:]):
        with consensus.fetches.writing():
            assert asking.waits()
            chunk.rank += 5
    assert asking.end() == {1: Chunks(6, 37).of(4), 2: Chunks(7, 37).of(4)}
    del consensus, chunk, asking


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
