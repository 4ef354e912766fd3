"""Stopping a job that is told to end: any rank may be told, at any time, and all stop after the
same step.

The answer is agreed through the store (consensus.py), in the one step in which somebody was told;
no other step pays for it.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

from hf_zero.distributed.mesh import Mesh
from hf_zero.errors import PartitionError
from hf_zero.logs import log_rank0


class Stopping:
    """Methods of :class:`hf_zero.core.engine.Engine` for jobs that are preempted.

    ``engine.stop_on(signal.SIGTERM)`` once on every rank, and after each ``step``: ``if
    engine.stop_requested``, save and leave.
    """

    mesh: Mesh
    schedule: Any

    def __init__(self) -> None:
        super().__init__()
        self._caught: dict[int, _Handler] = {}
        self._listens = self._told = self._stops = False

    def stop_on(self, *signals: int) -> None:
        """Listen for signals, and for :meth:`request_stop`, from now on. Every rank must call it
        before the next step.

        A signal among ``signals`` no longer ends this process. What handled it before is called
        too, and comes back with another ``stop_on()`` or at ``destroy``. Needs the main thread if
        there are signals.
        """
        if signals and threading.current_thread() is not threading.main_thread():
            raise PartitionError(
                "stop_on with signals needs the main thread: Python handles signals there alone; "
                "call stop_on() here and request_stop() from a handler"
            )
        self._give_signals_back()
        self._listens = True
        if self.mesh.consensus is not None:
            self.mesh.consensus.serve_out_of_order_gathers(self.schedule.read)
        for number in signals:
            self._caught[number] = _Handler(number, self.request_stop)

    def request_stop(self) -> None:
        """Ask all ranks to stop after one of the next steps.

        One rank is enough; signal handlers may call it.
        """
        if not self._listens:
            raise PartitionError(
                "request_stop() reaches only ranks that listen; call engine.stop_on() on every "
                "rank before training"
            )
        self._told = True
        if self.mesh.consensus is not None:
            self.mesh.consensus.request_stop()

    @property
    def stop_requested(self) -> bool:
        """Whether somebody was told to stop.

        It changes at the end of a step, on all ranks at that of the same one.
        """
        return self._stops

    def _meet_to_stop(self) -> None:
        """A step is over."""
        before, consensus = self._stops, self.mesh.consensus
        self._stops = before or (self._told if consensus is None else consensus.stopped)
        if self._stops and not before:
            log_rank0(
                "a rank was told to stop: all ranks see stop_requested now, after the same step"
            )

    def _give_signals_back(self) -> None:
        for handler in self._caught.values():
            handler.remove()
        self._caught = {}


class _Handler:
    """Stands in for what handled ``number`` before."""

    def __init__(self, number: int, told: Callable[[], None]):
        self._number, self._told, self._pid = number, weakref.WeakMethod(told), os.getpid()
        self._before = signal.signal(number, self)

    def __call__(self, number: int, frame: Any) -> None:
        told = self._told()
        # a child that was forked, a worker of a data loader, is to end as it would
        if told is None or os.getpid() != self._pid:
            signal.signal(number, self._before)
            os.kill(os.getpid(), number)
            return
        told()
        if callable(self._before) and self._before is not signal.default_int_handler:
            self._before(number, frame)

    def remove(self) -> None:
        now: Any = signal.getsignal(self._number)
        if now is self:
            signal.signal(self._number, self._before)
