"""Agreement through a store: ranks are threads that share one; they settle gathers, and fetch
and serve chunks.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hf_zero.distributed import rank_requests
from hf_zero.distributed import store as job_store
from hf_zero.distributed.consensus import Consensus
from hf_zero.distributed.rank_requests import STOP
from hf_zero.distributed.store import RollCall, ring
from hf_zero.distributed.watchdog import Watchdog
from hf_zero.errors import RankMismatchError
from tests.distributed.threads import Later, on_threads
from tests.helpers.cells import in_one_item


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


def test_a_rank_that_must_stay_waits_for_something_that_can_be_proved_to_hang() -> None:
    """It wanted to leave when all had entered."""
    store, waited = dist.HashStore(), []
    gathers = Consensus(store, 0, range(2), 60.0).gathers
    outcomes = iter([None, "0|7|0"])

    def wait(key: str, missing: Any, what: str, pending: Any, leaves: bool, at_once: bool) -> Any:
        waited.append((leaves, pending.log))
        if leaves:
            RollCall(store, "0", 2).enter(1, "state_dict|0|7|0|1")
        return next(outcomes)

    gathers._waits.wait_or_leave = wait  # type: ignore[method-assign]
    assert gathers.agree_or_leave("state_dict", (0, 7), say) == (0, 7)
    assert waited == [(True, None), (False, gathers._log)]


def test_the_store_keeps_the_last_agreement_alone() -> None:
    stores: list[Any] = []

    def run(consensus: Consensus, rank: int) -> list[tuple[int, int]]:
        stores.append(consensus.gathers._store)
        return [consensus.gathers.agree("forward", (1, unit), say) for unit in range(30)]

    assert together(3, run) == [[(1, unit) for unit in range(30)]] * 3
    assert stores[0].check(["29/go", "29/in", "29/n"])
    old = [f"{step}/{key}" for step in range(29) for key in ("go", "n", "in")]
    assert not any(stores[0].check([key]) for key in old)


@in_one_item(
    [
        ([(1, 2), (1, 5), (1, 3)], (1, 5)),
        ([(0, 9), (0, 9), (1, -8)], (1, -8)),
    ]
)
def test_of_differing_wishes_all_get_the_largest(case: Any) -> None:
    wishes, agreed = case
    where = "forward ('a|b', True)|x"  # the name of a pass may hold the separator
    got = together(3, lambda consensus, rank: consensus.gathers.agree(where, wishes[rank], say))
    assert got == [agreed] * 3


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


def test_of_many_fetches_the_first_and_every_power_of_ten_is_reported(
    trio: Any, heard: list[str]
) -> None:
    """A model whose steps use other blocks each time fetches in every step."""
    agreements, _, _ = trio
    for number in range(1, 25):
        agreements[0].fetches.fetch(number, f"layer.{number}", [], 0)
    first, tenth = heard
    assert first.startswith("layer.1 is needed here outside the recorded order")
    assert tenth.startswith("10 units so far") and "the last one is layer.10:" in tenth
    assert "zero_optimization.leaf_module" in tenth


def test_all_ranks_know_that_one_has_departed_at_the_next_step_and_forget_it(trio: Any) -> None:
    """Ranks of other replicas, which serve nothing, know of it when the fetch returns; if they
    learned of it after the next step, the ranks' plans would differ.
    """
    agreements, chunks, store = trio
    assert [consensus.steps.end_step() for consensus in agreements] == [False] * 3
    agreements[2].fetches.fetch(3, "layer.3", [0, 1], 37)
    agreements[0].fetches.fetch(4, "layer.4", [1, 2], 37)
    assert [consensus.steps.end_step() for consensus in agreements] == [True] * 3
    assert [consensus.steps.end_step() for consensus in agreements] == [False] * 3
    for unit in range(20):
        assert agreements[0].fetches.fetch(unit, "unit", [1], 37) == {1: chunks[1].of(unit)}
        assert not store.check([f"fetch/{unit + 3}/0/2"]), "nobody takes this chunk"
        assert [consensus.steps.end_step() for consensus in agreements] == [True] * 3


def test_hosts_that_are_steps_apart_renew_at_the_same_step(trio: Any) -> None:
    """A GPU's host runs ahead of the device: the order may only change at a step that no rank is
    past.
    """
    agreements, _, _ = trio
    ahead = [0, 3, 1]
    for consensus, steps in zip(agreements, ahead):
        assert [consensus.steps.end_step() for _ in range(steps)] == [False] * steps
    agreements[0].fetches.fetch(4, "layer.4", [1, 2], 37)
    for consensus, steps in zip(agreements, ahead):
        ended = [consensus.steps.end_step() for _ in range(5 - steps)]
        assert ended == [step == 3 for step in range(steps, 5)]
    del consensus


def test_an_event_comes_to_all_ranks_after_the_same_step_and_once(trio: Any) -> None:
    agreements, _, _ = trio
    ahead, event = [0, 3, 1], STOP - 7
    for consensus, steps in zip(agreements, ahead):
        for _ in range(steps):
            consensus.steps.end_step()
    seen: list[list[int]] = [[], [], []]

    def run(rank: int) -> None:
        for step in range(ahead[rank], 6):
            if rank == 0 and step < 4:  # again and again, as long as it has not come
                agreements[0].steps.broadcast_event(event)
            assert not agreements[rank].steps.end_step() and not agreements[rank].steps.stopped
            if agreements[rank].steps.events:
                assert agreements[rank].steps.events == {event}
                seen[rank].append(step)

    first = Later(partial(run, 0))
    while not agreements[0].gathers._store.check(["fetch/1/renew"]):
        first.waits(0.01)
    on_threads([partial(run, rank) for rank in (1, 2)])
    first.end()
    del consensus, first
    assert seen == [[3], [3], [3]], "the step at which the rank was that is ahead"


def test_a_request_is_served_although_an_earlier_one_is_on_its_way(trio: Any) -> None:
    """Rank 0 has counted its request and not yet written it when the bell rings for the next."""
    agreements, chunks, store = trio
    assert store.add("fetch/n", 1) == 1
    agreements[0].steps.asked.add(1)
    asking = Later(partial(agreements[1].fetches.fetch, 6, "layer.6", [0], 37))
    assert asking.end() == {0: chunks[0].of(6)}
    store.set("fetch/1", "0|-9|0|0")
    ring(store, [1, 2])
    store.wait(["fetch/1/all"], timedelta(seconds=60))
    del asking


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


def test_requests_leave_the_store_once_all_ranks_have_read_them(trio: Any) -> None:
    """Rank 2 learns of what rank 0 asks of rank 1 alone when it is rung for the next request."""
    agreements, chunks, store = trio
    keys = [f"fetch/{number}{end}" for number in (1, 2, 3) for end in ("", "/read", "/renew")]
    assert agreements[0].fetches.fetch(4, "layer.4", [1, 2], 37).keys() == {1, 2}
    assert not store.check(["fetch/1"]) and store.check(["fetch/1/renew"])
    assert agreements[0].fetches.fetch_alone(5, "layer.5", [1], 37) == {1: chunks[1].of(5)}
    assert store.check(["fetch/2"])
    agreements[1].steps.request_stop()
    assert [consensus.steps.end_step() for consensus in agreements[1:]] == [True] * 2
    assert agreements[0].steps.end_step()
    assert all(consensus.steps.stopped for consensus in agreements)
    left = [key for key in keys if store.check([key])]
    limit = time.monotonic() + 60  # rank 0 passes over its own when it is rung
    while left and time.monotonic() < limit:
        time.sleep(0.01)
        left = [key for key in keys if store.check([key])]
    assert not left
    assert not any(store.check([f"{key}/read"]) for key in keys)


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


def test_serving_ends_quietly_when_the_store_is_gone(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("connection closed")

        def clone(self) -> Any:
            return self

    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    consensus, chunks = Consensus(Gone(), 0, range(2), 5.0), Chunks(0, 4)
    consensus.fetches.serve(chunks.of)
    assert consensus.fetches.serving.thread is not None
    consensus.fetches.serving.thread.join(timeout=60)
    assert not consensus.fetches.serving.thread.is_alive() and failed == []
