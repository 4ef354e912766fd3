"""Graceful stop of a job: any rank may be asked to stop at any time, and all stop after the same
step.

The ranks agree through the store (consensus.py), only in the step in which a rank was asked; other
steps cost nothing. In a pipeline, whose stages each have a store of their own, the sum of the
losses carries the requests of all ranks. torchrun and Accelerate send signals to the process group
of a rank, so the workers of its DataLoaders get them, too, and a worker that ends fails its rank
before it can save.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data._utils import signal_handling

from hf_zero.distributed.mesh import Mesh
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.logging import log_rank0
from hf_zero.ops import native
from hf_zero.zero.gather.shared_shards import SharedShards
from hf_zero.zero.step.step_interfaces import StopRequests

if TYPE_CHECKING:
    from types import FrameType

_listening: weakref.WeakSet[HeardRequests] = weakref.WeakSet()  # of all engines of this process
HANDLED = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
_begin = signal_handling._set_worker_signal_handlers


def _begin_worker() -> None:
    """Let this worker, which was forked, pass over the signals that its rank listens for, unless
    the rank sends them: it ends its workers by SIGTERM.
    """
    _begin()
    signals = {handler.number for requests in _listening for handler in requests._handlers}
    if signals:
        native.end_by_parent_only(signals)


class HeardRequests(StopRequests):
    """Requests that this rank hears from its signals and its script, and from the other ranks."""

    def __init__(self, mesh: Mesh, shards: SharedShards):
        super().__init__(mesh, shards)
        self._handlers: list[_Handler] = []
        self._listens = False

    def listen(self, *signals: int) -> None:
        """Listen from now on. Raises ConfigError for what is no signal, or cannot be handled, and
        PartitionError for signals beside the main thread.
        """
        for number in signals:
            if not isinstance(number, int) or number not in HANDLED:
                raise ConfigError(
                    f"stop_on({number!r}): it is no number of a signal that a process can handle; "
                    "pass numbers one by one, such as signal.SIGTERM, without SIGKILL and SIGSTOP"
                )
        if signals and threading.current_thread() is not threading.main_thread():
            raise PartitionError(
                "stop_on with signals needs the main thread: Python handles signals only there; "
                "call stop_on() here and request_stop() from a handler"
            )
        self.restore_handlers()
        self._listens = True
        self._shards.serve()
        self._handlers = [_Handler(number, self.request) for number in signals]
        _listening.add(self)
        signal_handling._set_worker_signal_handlers = _begin_worker

    def move(self, mesh: Mesh, shards: SharedShards) -> None:
        """Continue with these parts, and repeat a request that the ranks have not agreed on."""
        self._mesh, self._shards = mesh, shards
        if self._listens:
            shards.serve()
        if self.asked and not self.agreed:
            self.request()

    @property
    def received(self) -> list[int]:
        return [handler.number for handler in self._handlers if handler.received]

    def request(self) -> None:
        if not self._listens:
            raise PartitionError(
                "request_stop() reaches only ranks that listen; call engine.stop_on() on every "
                "rank before training"
            )
        self.asked = True
        if self._mesh.consensus is not None and self._mesh.dims.pipeline == 1:
            self._mesh.consensus.steps.request_stop()

    def end_step(self) -> None:
        consensus = self._mesh.consensus
        if self._mesh.dims.pipeline == 1:
            self._agree(self.asked if consensus is None else consensus.steps.stopped)

    def end_run(self, requests: torch.Tensor) -> None:
        # read only on ranks that listen, since it may be on a device
        if self._listens and not self.agreed:
            self._agree(bool(requests))

    def _agree(self, stops: bool) -> None:
        before, self.agreed = self.agreed, self.agreed or stops
        if self.agreed and not before:
            log_rank0(
                "a rank was told to stop: all ranks see stop_requested now, after the same step"
            )

    def restore_handlers(self) -> None:
        for handler in self._handlers:
            handler.remove()
        self._handlers = []


class _Handler:
    """A signal handler that replaces the previous one of ``number``, and calls it."""

    def __init__(self, number: int, request: Callable[[], None]):
        self.number, self.received = number, False
        self._request, self._pid = weakref.WeakMethod(request), os.getpid()
        self._before = signal.signal(number, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        request = self._request()
        # a forked child ends as it would without this handler
        if request is None or os.getpid() != self._pid:
            signal.signal(number, self._before)
            os.kill(os.getpid(), number)
            return
        self.received = True
        request()
        if callable(self._before) and self._before is not signal.default_int_handler:
            self._before(number, frame)

    def remove(self) -> None:
        """Restore the previous handler, in the signal or in the later handler that calls this."""
        handler: Any = signal.getsignal(self.number)
        number, before = self.number, self._before
        if handler is self:
            signal.signal(number, before)
        while isinstance(handler, _Handler):
            if handler._before is self:
                handler._before = before
            handler = handler._before
