"""A wait that lasts is warned about, by name, each minute; one that ends, or never was, is not. Time is a number here."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from hf_zero.core import watch as module
from hf_zero.core.lane import Wait
from hf_zero.core.watch import Watch


class Clock:
    """Stands for the clock and for the event on which the watching thread sleeps: a sleep moves the clock."""

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

    def run(self, watch: Watch, seconds: float) -> None:
        """Let the watching thread's loop run for ``seconds``, on this thread."""
        self.last = self.now + seconds
        module._run(weakref.ref(watch), self)  # type: ignore[arg-type]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(module.threading.Thread, "start", lambda self: None)
    return clock


def test_a_silent_wait_is_warned_about_each_minute(clock: Clock, heard: list[str]) -> None:
    watch = Watch()
    with watch.over(Wait("all-gather of layer.3")):
        clock.run(watch, 59)
        assert heard == []
        clock.run(watch, 200)
    assert [message.split(":")[0] for message in heard] == [
        "waiting for all-gather of layer.3 since 60 s",
        "waiting for all-gather of layer.3 since 120 s",
        "waiting for all-gather of layer.3 since 180 s",
        "waiting for all-gather of layer.3 since 240 s",
    ]
    assert "another rank has not joined" in heard[0]


def test_many_short_waits_are_not_warned_about(clock: Clock, heard: list[str]) -> None:
    watch = Watch()
    for number in range(10):
        with watch.over(Wait(f"wait {number}")):
            clock.run(watch, 30)
    assert heard == []


def test_each_wait_has_a_minute_of_its_own(clock: Clock, heard: list[str]) -> None:
    watch = Watch()
    waits = [watch.over(Wait("first")), watch.over(Wait("second"))]
    waits[0].__enter__()

    def change() -> None:
        waits[0].__exit__(None, None, None)
        waits[1].__enter__()

    clock.at[clock.now + 90] = change
    clock.run(watch, 90 + 61)
    assert [message.split(":")[0] for message in heard] == ["waiting for first since 60 s", "waiting for second since 60 s"]


def test_nobody_waits_after_an_end_or_an_error(clock: Clock, heard: list[str]) -> None:
    watch = Watch()
    with pytest.raises(KeyError), watch.over(Wait("broken")):
        raise KeyError
    clock.run(watch, 300)
    assert heard == []


def test_a_shorter_limit_is_looked_at_more_often(clock: Clock, heard: list[str]) -> None:
    watch = Watch(warn_after=0.4)
    with watch.over(Wait("quick")):
        clock.run(watch, 0.9)
    assert len(heard) == 2


def test_a_watch_that_is_off_starts_no_thread() -> None:
    watch = Watch(enabled=False)
    before = threading.active_count()
    with watch.over(Wait("nothing")):
        assert threading.active_count() == before and watch._thread is None


def test_one_thread_serves_all_waits_and_ends_when_closed() -> None:
    watch = Watch(warn_after=0.01)
    assert watch._thread is None, "a thread before the first wait"
    with watch.over(Wait("one")):
        thread = watch._thread
    with watch.over(Wait("two")):
        assert watch._thread is thread and thread is not None and thread.daemon
    watch.close()
    thread.join(timeout=10)
    assert not thread.is_alive()
