"""The update thread, which runs the most urgent waiting job first."""

from __future__ import annotations

import heapq
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch

from hf_zero.device import kinds


@dataclass(order=True)
class _Job:
    """A job; the smallest runs first."""

    urgency: int
    number: int
    run: Callable[[], Any] = field(compare=False)
    future: Future[Any] = field(compare=False)


class UpdateQueue:
    """Jobs for one thread, which the first job starts, working on ``device``."""

    def __init__(self, device: torch.device):
        self._device = device
        self._worker: ThreadPoolExecutor | None = None
        self._waiting: list[_Job] = []  # a heap
        self._numbers = count()
        self._lock = threading.Lock()

    def submit(self, urgency: int, run: Callable[[], Any], future: Future[Any]) -> None:
        """Queue ``run``; ``future`` gets its result or exception. Waiting jobs with less
        ``urgency`` run first, among equal ones the oldest.
        """
        if self._worker is None:
            begin = partial(kinds.set_device, self._device)
            self._worker = ThreadPoolExecutor(1, "hf-zero update", initializer=begin)
            weakref.finalize(self, self._worker.shutdown, wait=False)
        with self._lock:
            heapq.heappush(self._waiting, _Job(urgency, next(self._numbers), run, future))
        self._worker.submit(self._run_next)

    def _run_next(self) -> None:
        with self._lock:
            job = heapq.heappop(self._waiting)
        try:
            job.future.set_result(job.run())
        except BaseException as error:
            job.future.set_exception(error)

    def close(self) -> None:
        """Finish the queued jobs and end the thread."""
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None
