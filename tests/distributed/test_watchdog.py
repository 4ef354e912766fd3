"""A wait that lasts is warned about, by name, each minute; one that ends, or never was, is not.

Time is a number here.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hf_zero.distributed import watchdog as module
from hf_zero.distributed.collective_log import CollectiveLog, PendingCollective
from hf_zero.distributed.rank_status import RankStatus
from hf_zero.distributed.watchdog import Watchdog
from hf_zero.errors import RankMismatchError


class Clock:
    """Stands for the clock and for the event on which the watching thread sleeps: a sleep moves
    the clock.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.last = 0.0
        self.at: dict[float, Callable[[], None]] = {}

    def wait(self, seconds: float) -> bool:
        assert 0 <= seconds <= 1.0, "the thread must look often enough to warn in time"
        self.now += seconds
        for moment in sorted(moment for moment in self.at if moment <= self.now):
            self.at.pop(moment)()
        return self.now >= self.last

    def run(self, watchdog: Watchdog, seconds: float) -> None:
        """Let the watching thread's loop run for ``seconds``, on this thread."""
        self.last = self.now + seconds
        module._run(weakref.ref(watchdog), self)  # type: ignore[arg-type]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(Watchdog, "start", lambda self: None)
    return clock


def test_a_silent_wait_is_warned_about_each_minute(clock: Clock, heard: list[str]) -> None:
    watchdog = Watchdog()
    with watchdog.watching(PendingCollective("all-gather of layer.3")):
        clock.run(watchdog, 59)
        assert heard == []
        clock.run(watchdog, 200)
    said = [message.split(":")[0] for message in heard]
    waits = "still waiting for all-gather of layer.3 after"
    assert said == [f"{waits} {seconds} s" for seconds in (60, 120, 180, 240)]
    assert "another rank has not joined" in heard[0]
    heard.clear()
    for number in range(10):  # short waits
        with watchdog.watching(PendingCollective(f"wait {number}")):
            clock.run(watchdog, 30)
    with pytest.raises(KeyError), watchdog.watching(PendingCollective("broken")):
        raise KeyError
    clock.run(watchdog, 300)
    assert heard == [], "nobody waits after an end or an error"


def test_a_look_that_fails_is_not_the_last(heard: list[str]) -> None:
    """A query of an event raises while another thread captures a CUDA graph."""
    watchdog, looks, again = Watchdog(warn_after=1000.0), [0], threading.Event()

    def is_over() -> bool:
        if threading.current_thread() is not watchdog._thread:
            return False
        looks[0] += 1
        if looks[0] > 2:
            again.set()
        raise RuntimeError("operation not permitted when stream is capturing")

    log = CollectiveLog("gathers", (0, 1), 1000.0)
    watchdog.follow(PendingCollective("all-gather", log, 0, (0, 1)), is_over)
    try:
        assert again.wait(60)
        assert [each for each in heard if "failed, and goes on" in each] == heard[:1]
    finally:
        watchdog.close()


def two_ranks(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Watchdog], list[CollectiveLog]]:
    store, logs, watches = dist.HashStore(), [], []
    for rank in range(2):
        rank_status = RankStatus(store, rank, 2)
        logs.append(rank_status.register(CollectiveLog("gathers", range(2), 1000.0, native=False)))
        watches.append(Watchdog(rank_status=rank_status))
        monkeypatch.setattr(watches[-1], "start", lambda: None)
    return watches, logs


def test_communicators_are_aborted_together(caplog: pytest.LogCaptureFixture) -> None:
    """NCCL's abort of one returns when the device is idle: when the others are aborted, too. One
    that cannot be aborted keeps no other from it.
    """

    def fails() -> None:
        raise RuntimeError("no such group")

    here, idle = RankStatus(dist.HashStore(), 0, 2), threading.Barrier(3)
    off = partial(idle.wait, 10.0)
    for name, call in (("gathers", off), ("broken", fails), ("reductions", off), ("updates", off)):
        here.register(CollectiveLog(name, range(2), 60.0, call))  # type: ignore[arg-type]
    watchdog = Watchdog(rank_status=here)
    watchdog.end("rank 1 has failed")
    watchdog.close()
    assert caplog.text.count("could not abort") == 1 and "could not abort broken" in caplog.text
    assert not idle.broken
    with pytest.raises(RankMismatchError, match="rank 1 has failed"):
        watchdog.check()


class Record:
    """The record of a run, which gets the states of all ranks."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def note(self, kind: str, states: Any) -> None:
        assert kind == "ranks"
        self.states.append([(row["ranks"], row["state"], row["what"]) for row in states])


def test_the_states_of_all_ranks_are_noted_in_a_long_wait(
    clock: Clock, heard: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each change, and when the wait is over; a short one is none of a record's."""
    watches, logs = two_ranks(monkeypatch)
    record = Record()
    watches[0].records.add(record)
    status: Any = watches[1].rank_status
    for log in logs:
        pending = log.issue("all-gather of layer.0")
    status.publish("waits", pending=pending)  # it has gone on since
    with watches[0].watching(logs[0].issue("all-gather of layer.1")):
        clock.run(watches[0], module.NOTED_SECONDS - 1)
        assert record.states == []
        clock.run(watches[0], 20)
        waits = "all-gather of layer.1 (number 1 of gathers)"
        assert record.states == [[([0], "waits", waits), ([1], "runs", "")]]
        status.publish("waits", pending=logs[1].issue("all-gather of layer.1"))
        clock.run(watches[0], 20)
        assert record.states[1:] == [[([0, 1], "waits", waits)]]
    clock.run(watches[0], 20)
    assert record.states[2:] == [[([0, 1], "runs", "")]]
    with watches[0].watching(logs[0].issue("all-gather of layer.2")):
        status.publish("failed", "ValueError: bad batch")
        clock.run(watches[0], 4)
    assert record.states[3:] == [
        [
            ([0], "broken", "rank 1 has failed: ValueError: bad batch"),
            ([1], "failed", "ValueError: bad batch"),
        ]
    ]
    del record
    assert not watches[0].records
