"""Times of blocks on the device, read once they are over: nothing waits for the device.

[Note: read a step late]
On a device a block is timed by two events on the current stream, the host's clock on a CPU. The
events of a step are read at the end of a later step, when the last of them is over; a host that
runs far ahead of its device reads several steps at once.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from hf_zero.device import kinds

Mark = float | Any
"""A point in time: seconds of the host's clock, or an event that the current stream records."""


def mark(device: torch.device) -> Mark:
    """Return now: the host's clock, or an event recorded on the current stream of ``device``."""
    if kinds.is_host(device):
        return time.perf_counter()
    event = kinds.module_of(device).Event(enable_timing=True)
    event.record(kinds.module_of(device).current_stream(device))
    return event


def is_over(point: Mark) -> bool:
    """Whether the device has reached ``point``."""
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
