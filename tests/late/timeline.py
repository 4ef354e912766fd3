"""Simulated time: what ran when, by the rates of a cost model, and how much of it lay beside
other work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tests.late import device

HOST = device.C.HOST


class Ran(NamedTuple):
    """A task, in simulated seconds. ``stream``: by number; HOST + n is lane n of the host."""

    stream: int
    what: str
    site: str
    start: float
    end: float
    nbytes: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@contextlib.contextmanager
def traced(**rates: float) -> Iterator[Callable[[], list[Ran]]]:
    """Inside, tasks are noted; what it gives returns them.

    ``rates``: flops, memory, to_device, to_host, network (a second each), launch, shortest.
    """
    device.C.set_rates(rates)
    device.forget()
    device.C.set_tracing(True)
    try:
        yield lambda: [Ran(*row) for row in device.C.trace()]
    finally:
        device.C.set_tracing(False)


@contextlib.contextmanager
def host_lane(lane: int, not_before: float = 0.0) -> Iterator[None]:
    """This thread's work counts on a clock of its own, beside the thread that launches."""
    before = device.C.set_lane(lane)
    device.C.host_not_before(not_before)
    try:
        yield
    finally:
        device.C.set_lane(before)


def host_now() -> float:
    """The time of this thread's lane."""
    return float(device.C.host_work(0.0, ""))


def total(tasks: Sequence[Ran]) -> float:
    """Seconds in which at least one of ``tasks`` runs."""
    return sum(end - start for start, end in _merged(tasks))


def beside(tasks: Sequence[Ran], others: Sequence[Ran]) -> float:
    """Seconds in which one of ``tasks`` and one of ``others`` run."""
    theirs = _merged(others)
    both = (
        (max(start, low), min(end, high)) for start, end in _merged(tasks) for low, high in theirs
    )
    return sum(max(0.0, high - low) for low, high in both)


def _merged(tasks: Sequence[Ran]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for task in sorted(tasks, key=lambda task: task.start):
        if merged and task.start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], task.end)
        elif task.seconds > 0:
            merged.append((task.start, task.end))
    return merged
