"""All-gathers of whole parameters after sharded updates: one thread issues all of them, in one
order.

[Note: when a gather is issued]
The device runs the collectives of all communicators, and every rank must issue them in one order.
So a gather is not issued at the end of its unit's update, at a time that depends on the clock, but
when the training thread allows it and waits until it is issued: a forward allows all units up to
the one it needs (:meth:`UpdateGathers.wait`), and every other collective allows all remaining ones
(:meth:`UpdateGathers.issue_all`, a deferred collective of ``collective_log.py``).

A rank may reach neither while another one needs its part: rank 0 evaluates alone, the others wait
in a torch barrier. So a rank that needs a gather posts this in the store. A rank that reads the
post, and whose own training does not reach that gather within :data:`GRACE_SECONDS`, issues it.
Only then does the clock influence the order. What a backward has updated is gathered by the clock
only once its step is complete, or its reductions and the agreements of the step would come after
such a gather on one rank and before it on another; unless a rank needs it before its own step,
which it posts under another topic: then it is gathered once the backward has issued its reductions.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from hf_zero.device import streams
from hf_zero.distributed.collectives import MeshDim
from hf_zero.distributed.handle import Handle
from hf_zero.distributed.hang_detection import JOIN_SECONDS
from hf_zero.distributed.store import StoreMessages, next_pause

GRACE_SECONDS = 0.3
POLL_SECONDS = 0.1
ASKED, BEFORE_STEP = "needed", "needed before the step"  # topics of posts
Messages = Sequence[tuple[MeshDim, Sequence[tuple[torch.Tensor, torch.Tensor]]]]


class Gather:
    """The all-gather of the updated parameters of one unit; ``number`` is its place in the rank's
    order.

    messages: the dimension, and (whole, own part) pairs for
    :meth:`hf_zero.distributed.collectives.MeshDim.all_gather`. updated: done once the host has
    written the own parts, or has queued their copies in ``stream``.
    """

    def __init__(
        self,
        number: int,
        label: str,
        messages: Messages,
        updated: Future[streams.Event | None],
        stream: streams.Stream | None,
    ):
        self.number, self.label, self.messages = number, label, messages
        self.updated, self.stream = updated, stream
        self.since = 0.0  # time of its update
        self.issued: Future[Sequence[Handle]] = Future()


class UpdateGathers:
    """The gathers of one engine's updates, over dimensions with communicators of their own.

    other_ranks: the other ranks (global) in them. messages: the store in which ranks post what they
    need; None without a common store. begin: first call of the thread.
    """

    def __init__(
        self, other_ranks: Sequence[int], messages: StoreMessages | None, begin: Callable[[], None]
    ):
        self.other_ranks, self._messages, self._begin = tuple(other_ranks), messages, begin
        self._changed = threading.Condition()
        self._queue: deque[Gather] = deque()
        self._added = 0
        self._allowed = 0  # number of gathers that this rank may issue, counted from the first
        self._owed = 0  # number to be issued before another collective
        self._reduced = 0  # number whose backward has issued all its reductions
        # by topic: numbers that this rank waits for, has posted, and that some rank has posted
        self._needed, self._said, self._asked = ({ASKED: 0, BEFORE_STEP: 0} for _ in range(3))
        self._since = 0.0  # time when that was read, or gathers were allowed here
        self._looked = 0.0
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(
        self,
        label: str,
        messages: Messages,
        updated: Future[streams.Event | None],
        stream: streams.Stream | None,
    ) -> Gather:
        """Append a gather to the order, which must be the same on all ranks."""
        with self._changed:
            self._added += 1
            gather = Gather(self._added, label, messages, updated, stream)
            self._queue.append(gather)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="hf-zero update gathers", daemon=True
                )
                _running.add(self)
                self._thread.start()
        updated.add_done_callback(partial(self._is_updated, gather))
        return gather

    def complete(self) -> None:
        """Mark all gathers of a step as added: other collectives wait for them from now on."""
        self._owed = self._reduced = self._added

    def end_backward(self) -> None:
        """Let the gathers of a backward's own updates be issued, for a rank that needs them."""
        self._reduced = self._added

    def wait(self, gather: Gather) -> None:
        """Issue ``gather`` and those before it, and wait for it (on a GPU: make the current stream
        wait). Raises the exception of the update or the gather.
        """
        with self._changed:
            topic = ASKED if gather.number <= self._owed else BEFORE_STEP
            self._needed[topic] = max(self._needed[topic], gather.number, self._owed)
            self._allow(gather.number)
        for handle in gather.issued.result():
            handle.wait()

    def issue_all(self) -> None:
        """Wait until all gathers of complete steps are issued.

        Exceptions of updates are left to :meth:`wait`.
        """
        if not self._queue:
            return
        with self._changed:
            due = [gather for gather in self._queue if gather.number <= self._owed]
            if due:
                self._allow(due[-1].number)
        for gather in due:
            gather.issued.exception()

    def _allow(self, number: int) -> None:
        self._allowed = max(self._allowed, number)
        self._since = time.monotonic()
        self._changed.notify_all()

    def _is_updated(self, gather: Gather, _: Future[streams.Event | None]) -> None:
        with self._changed:
            gather.since = time.monotonic()
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread; gathers not issued yet never are."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        self._begin()
        while True:
            with self._changed:
                if self._closed:
                    self._drop(RuntimeError("the engine of this update was destroyed"))
                    return
                gather = self._next()
                talks = gather is None and self._has_to_talk()
                if gather is None and not talks:
                    self._changed.wait(POLL_SECONDS if self._queue else None)
            if gather is not None:
                self._issue(gather)
            elif talks:
                self._talk()

    def _next(self) -> Gather | None:
        """Return the next gather, if it should be issued now."""
        if not self._queue or not self._queue[0].updated.done():
            return None
        first = self._queue[0]
        since = max(self._since, first.since)
        asked = max(
            min(self._asked[ASKED], self._owed), min(self._asked[BEFORE_STEP], self._reduced)
        )
        overdue = first.number <= asked and time.monotonic() - since >= GRACE_SECONDS
        return first if overdue or first.number <= self._allowed else None

    def _has_to_talk(self) -> bool:
        if self._needed != self._said:
            return True
        if not self._queue or not self._queue[0].updated.done():
            return False
        now, since = time.monotonic(), max(self._since, self._queue[0].since)
        return now - self._looked >= max(POLL_SECONDS, next_pause(now - since))

    @torch.no_grad()
    def _issue(self, gather: Gather) -> None:
        try:
            gather.updated.result()
            with streams.on_stream(gather.stream):
                handles = [
                    dim.all_gather(pairs, f"updated {gather.label}")
                    for dim, pairs in gather.messages
                ]
        except BaseException as error:
            with self._changed:
                self._drop(error)
            return
        with self._changed:
            self._queue.popleft()
        gather.issued.set_result(handles)

    def _drop(self, error: BaseException) -> None:
        """Fail all remaining gathers: their order is broken on this rank."""
        while self._queue:
            self._queue.popleft().issued.set_exception(error)

    def _talk(self) -> None:
        """Post what this rank needs, and read the posts of others."""
        self._looked, needed = time.monotonic(), dict(self._needed)
        # before a step is complete, posts about its gathers alone matter, and after it the others
        topics = {ASKED} | {topic for topic in needed if needed[topic] > self._said[topic]}
        topics |= {BEFORE_STEP} if self._reduced > self._owed else set()
        requested = dict.fromkeys(topics, 0)
        messages = self._messages
        if messages is not None:
            try:
                for topic in topics:
                    requested[topic] = messages.asked(topic)
                    if needed[topic] > max(self._said[topic], requested[topic]):
                        messages.ask(topic, needed[topic])
            except RuntimeError:  # the store is closed: the job has ended
                self._messages = None
        self._said = needed
        for topic, number in requested.items():
            if number > self._asked[topic]:
                self._asked[topic], self._since = number, time.monotonic()


_running: weakref.WeakSet[UpdateGathers] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """End the threads at exit: one that returns from the store's C++ while the interpreter shuts
    down would abort the process.
    """
    ending = list(_running)
    for gathers in ending:
        gathers.close()
    for gathers in ending:
        gathers.join()
