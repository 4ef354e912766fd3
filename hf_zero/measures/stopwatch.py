"""Times of blocks on the device, read once they are over: nothing waits for the device. Those of
forward, backward and step are ``wall_clock_breakdown``.

[Note: read a step late]
On a device a block is timed by two events on the current stream, the host's clock on a CPU. The
events of a step are read at the end of a later step, when the last of them is over; a host that
runs far ahead of its device reads several steps at once.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from hf_zero.device import kinds, spans
from hf_zero.logging import logger

Mark = float | Any
"""A point in time: seconds of the host's clock, or an event that the current stream records."""


def mark(device: torch.device) -> Mark:
    """Return now: the host's clock, or an event recorded on the current stream of ``device``."""
    if kinds.is_synchronous(device):
        return time.perf_counter()
    event = kinds.module_of(device).Event(enable_timing=True)
    event.record(kinds.module_of(device).current_stream(device))
    return event


def is_over(point: Mark) -> bool:
    """Return whether the device has reached ``point``."""
    return isinstance(point, float) or bool(point.query())


def milliseconds(begin: Mark, end: Mark) -> float:
    """Return the milliseconds from ``begin`` to ``end``; waits for ``end``."""
    if isinstance(begin, float) or isinstance(end, float):
        return 1e3 * (end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end))


class Stopwatch:
    """Context manager that marks the begin and the end of a block on ``device``."""

    def __init__(self, device: torch.device):
        self._device = device
        self._begin: Mark = 0.0
        self._end: Mark = 0.0

    def __enter__(self) -> Stopwatch:
        self._begin = mark(self._device)
        return self

    def __exit__(self, *raised: object) -> None:
        self._end = mark(self._device)

    def read(self) -> float:
        """Return the milliseconds of the block; waits until it is over."""
        return milliseconds(self._begin, self._end)


PARTS = ("fwd", "bwd", "step")


class _MicroBatch(NamedTuple):
    watches: dict[str, list[Stopwatch]]
    ends_window: bool
    number: int  # optimizer steps that have ended
    end: Mark


class StepTimes:
    """``micro_batch`` and ``window``: milliseconds by part for the last ``engine.step()`` that has
    been read, with its forwards and backwards, and for the last accumulation window; empty before.

    ``every``: rank 0 logs a line with means each so many steps; 0 logs none.
    """

    def __init__(self, on: bool, every: int, device: torch.device, rank: int):
        self.micro_batch: dict[str, float] = {}
        self.window: dict[str, float] = {}
        self.windows: deque[tuple[int, dict[str, float]]] = deque(maxlen=64)  # with their steps
        self.on, self._every, self._device, self._rank = on, every, device, rank
        self._now: defaultdict[str, list[Stopwatch]] = defaultdict(list)
        self._unread: deque[_MicroBatch] = deque()
        self._in_window = dict.fromkeys(PARTS, 0.0)
        self._to_print: list[dict[str, float]] = []  # windows since the last line

    def timed(self, part: str) -> AbstractContextManager[object]:
        """Return a context manager for a forward ("fwd"), a backward ("bwd") or a "step"."""
        if not self.on:
            return spans.NOTHING
        watch = Stopwatch(self._device)
        self._now[part].append(watch)
        return watch

    def end(self, ends_window: bool, number: int) -> None:
        """End a step() call, the last of ``number`` steps so far if it ``ends_window``; read those
        before it that the device has completed.
        """
        watches, self._now = self._now, defaultdict(list)
        self._unread.append(_MicroBatch(watches, ends_window, number, mark(self._device)))
        while self._unread and is_over(self._unread[0].end):
            self._read(self._unread.popleft())

    def restart(self) -> None:
        """Drop what has not been reported: a load has changed the number of steps."""
        self._now.clear()
        self._unread.clear()
        self.windows.clear()
        self._to_print.clear()
        self._in_window = dict.fromkeys(PARTS, 0.0)

    def finish(self) -> None:
        """Read the rest; waits for the device."""
        while self._unread:
            self._read(self._unread.popleft())

    def _read(self, ended: _MicroBatch) -> None:
        self.micro_batch = {
            part: sum(watch.read() for watch in ended.watches[part]) for part in PARTS
        }
        for part, milliseconds in self.micro_batch.items():
            self._in_window[part] += milliseconds
        if not ended.ends_window:
            return
        self.window, self._in_window = self._in_window, dict.fromkeys(PARTS, 0.0)
        self.windows.append((ended.number, self.window))
        self._to_print.append(self.window)
        if self._every and ended.number % self._every == 0:
            self._print(ended.number)

    def _print(self, number: int) -> None:
        windows, self._to_print = self._to_print, []
        if self._rank == 0:
            means = {part: sum(w[part] for w in windows) / len(windows) for part in PARTS}
            logger.info(
                "step %d: time (ms) | %s, means of %d steps",
                number,
                " | ".join(f"{part}: {mean:.2f}" for part, mean in means.items()),
                len(windows),
            )
