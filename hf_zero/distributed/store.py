"""The job's key-value store: calls with a time limit, waits that name the missing ranks, and
messages between ranks.

torch's client of the store blocks in native code as long as the network lets it, whatever timeout
it was given: :class:`TimeoutStore` calls it on another thread. :class:`StoreMessages` lets
background threads of different ranks exchange results without a collective, which could match one
of the training. :class:`StoreWait` waits on the training thread, under the watchdog.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from hf_zero.distributed.collective_log import PendingCollective
from hf_zero.distributed.watchdog import Watchdog
from hf_zero.errors import HfZeroError, RankMismatchError
from hf_zero.logging import logger

TIMEOUT_SECONDS = 5.0
SLICES = 20  # parts of such a wait
FIRST_PAUSE, LAST_PAUSE = 0.002, 0.25  # seconds between polls
POLL_SECONDS = 0.05
FIRST_POLL_SECONDS = 0.0002
SLICE_SECONDS = 1.0  # between checks for missing ranks
WARN_SECONDS = 60.0
ENDED = "destroyed its engine or ended"
STORE_SECONDS = 60.0  # after which a store that does not answer counts as gone


class TimeoutStore:
    """Calls of ``store`` for posts, all from one thread, each limited to ``seconds``; RuntimeError
    if it does not answer.
    """

    def __init__(self, store: Any, seconds: float = TIMEOUT_SECONDS):
        self._store = store.clone() if hasattr(store, "clone") else store
        self._seconds = seconds
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._lost = False
        # the thread ends with this object, unless it is blocked itself
        weakref.finalize(self, self._calls.put, None)

    def set(self, key: str, value: str) -> None:
        self._ask("set", key, value)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys))

    def get(self, key: str) -> bytes:
        """Return the value of an existing key."""
        return bytes(self._ask("get", key))

    def _ask(self, name: str, *args: Any) -> Any:
        if self._lost:
            raise RuntimeError("the ranks' store does not answer")
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_answer,
                    args=(self._store, self._calls),
                    name="hf_zero-posts",
                    daemon=True,
                )
                self._thread.start()
        call = _Call(name, args)
        self._calls.put(call)
        # In slices: if another thread held the interpreter's lock for longer, or the process was
        # suspended, one slice is over at once, and the others still wait.
        if not any(call.done.wait(self._seconds / SLICES) for _ in range(SLICES)):
            self._lost = True
            raise RuntimeError(f"the ranks' store has not answered for {self._seconds:g} s")
        if call.error is not None:
            raise call.error
        return call.answer


class _Call:
    def __init__(self, name: str, args: tuple[Any, ...]):
        self.name, self.args = name, args
        self.done = threading.Event()
        self.answer: Any = None
        self.error: RuntimeError | None = None


def _answer(store: Any, calls: queue.SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        try:
            call.answer = getattr(store, call.name)(*call.args)
        except RuntimeError as error:
            call.error = error
        call.done.set()


class StoreMessages:
    """Messages of one rank through ``store``. Each message on a topic replaces the last one of its
    rank, so that none accumulate.

    gone(rank): the reason why nothing more will come from a rank, or None; called only while a
    message is missing. timeout: seconds after which a missing message is an error.
    """

    def __init__(self, store: Any, rank: int, timeout: float, gone: Callable[[int], str | None]):
        self._store = TimeoutStore(store, STORE_SECONDS)
        self._rank, self._timeout, self._gone = rank, timeout, gone
        # starts the calling thread: none can be started once the interpreter ends
        self._store.add("opened", 1)

    def send(self, topic: str, number: int, message: str) -> None:
        """Publish ``message`` as this rank's ``number``-th on ``topic``.

        Raises RuntimeError if the store is gone.
        """
        self._store.set(f"{topic}/{self._rank}", f"{number}|{message}")

    def ask(self, topic: str, number: int) -> None:
        """Tell all ranks that this one waits for the first ``number`` of what ``topic`` counts.

        Raises RuntimeError if the store is gone.
        """
        self._store.set(f"asked/{topic}", str(number))

    def asked(self, topic: str) -> int:
        """Return the last number asked for by any rank; 0 before. Raises RuntimeError if the store
        is gone.
        """
        key = f"asked/{topic}"
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def receive(self, topic: str, number: int, rank: int) -> str:
        """Return the ``number``-th message of ``rank`` on ``topic``.

        Raises RankMismatchError if it will not come, RuntimeError if the store is gone.
        """
        key, pause, limit = f"{topic}/{rank}", FIRST_PAUSE, time.monotonic() + self._timeout
        gone: str | None = None
        while True:
            found, _, message = (
                self._store.get(key).decode().partition("|")
                if self._store.check([key])
                else ("-1", "", "")
            )
            if int(found) == number:
                return message
            if gone is not None:  # known before the last poll
                raise RankMismatchError(
                    f"rank {rank} did not report the result of its write: {gone}; its own "
                    "output says more"
                )
            gone = self._gone(rank)
            if time.monotonic() > limit:
                gone = (
                    gone
                    or f"nothing was heard of it for {self._timeout:g} s (the timeout "
                    "of the configuration)"
                )
            time.sleep(pause)
            pause = min(1.5 * pause, LAST_PAUSE)


class StoreWait:
    """The waits of ``rank`` for keys of ``store``, each of ``timeout`` seconds at most."""

    def __init__(self, store: Any, rank: int, timeout: float, watchdog: Watchdog):
        self._store = store
        self._rank = rank
        self.timeout = timeout
        self._watchdog = watchdog

    def wait(
        self,
        key: str,
        arrivals: Mapping[int, str],
        what: str,
        pending: PendingCollective | None = None,
    ) -> str:
        """Return the value of ``key`` once it is set; it is set after the ranks of ``arrivals``
        have set their keys.

        A warning each minute names the ranks whose keys are missing, which are to do ``what``.
        Raises RankMismatchError if one of them has ended, at the timeout, and for what the watchdog
        finds.
        """
        value = self.wait_or_leave(key, arrivals, what, pending, may_leave=False)
        assert value is not None
        return value

    def wait_or_leave(
        self,
        key: str,
        arrivals: Mapping[int, str],
        what: str,
        pending: PendingCollective | None = None,
        may_leave: bool = True,
        at_once: bool = False,
    ) -> str | None:
        """Wait like :meth:`wait`; with ``may_leave`` return None if a missing rank is
        :meth:`elsewhere`, checked after a second, or ``at_once``.
        """
        pending = pending or PendingCollective(f"ranks to {what}", warns=True)
        try:
            with self._watchdog.watching(pending):
                if not self._poll(key, arrivals, what, may_leave, at_once):
                    return None
        except RuntimeError as error:
            if isinstance(error, HfZeroError):
                raise
            raise self._watchdog.explain_failure(pending, error) from error  # the store is gone
        return str(self._store.get(key).decode())

    def is_over(self, rank: int) -> bool:
        """Whether ``rank`` is known to have failed, died or ended."""
        status = self._watchdog.rank_status
        return status is not None and status.exit_reason(rank) is not None

    def elsewhere(self, rank: int) -> bool:
        """Whether ``rank`` cannot come before this rank goes on: it ends its engine or its script,
        or it waits in a collective that needs this rank.
        """
        status = self._watchdog.rank_status
        gone = any(self._store.check([key]) for key in (_closed(rank), leaving(rank)))
        return gone or (status is not None and status.is_elsewhere(rank))

    def _poll(
        self, key: str, arrivals: Mapping[int, str], what: str, may_leave: bool, at_once: bool
    ) -> bool:
        """Return True once ``key`` is set; False if this rank may leave and others do not come."""
        # Not store.wait(): torch prints two lines whenever it gives up.
        started = time.monotonic()
        looked = started - SLICE_SECONDS if may_leave and at_once else started
        warned, pause = WARN_SECONDS, FIRST_POLL_SECONDS
        while True:
            self._watchdog.check()
            if self._store.check([key]):
                return True
            now = time.monotonic()
            if now - looked >= min(SLICE_SECONDS, self.timeout):
                looked = now
                if may_leave and any(
                    self.elsewhere(rank)
                    for rank, arrival in arrivals.items()
                    if rank != self._rank and not self._store.check([arrival])
                ):
                    return False
                warned = self._report_missing(key, arrivals, what, now - started, warned)
            time.sleep(pause)
            pause = min(1.2 * pause, POLL_SECONDS)

    def _report_missing(
        self, key: str, arrivals: Mapping[int, str], what: str, waited: float, warned: float
    ) -> float:
        """Raise if ``key`` will never be set, warn each minute; return the time of the next
        warning, in seconds of the wait.
        """
        missing = [rank for rank, arrival in arrivals.items() if not self._store.check([arrival])]
        gone = {
            rank: self._store.get(_closed(rank)).decode()
            for rank in missing
            if self._store.check([_closed(rank)])
        }
        if gone and not self._store.check([key]):
            raise RankMismatchError(
                f"rank {self._rank} needs all ranks to {what}, but "
                f"{'; '.join(f'rank {rank} has {why}' for rank, why in gone.items())}; "
                "every rank must run the same number of forwards, and destroy or "
                "end after the last one"
            )
        text = (
            f"rank {self._rank} has waited {waited:.0f} s for ranks "
            f"{', '.join(map(str, missing))} to {what}"
        )
        if waited >= self.timeout:
            raise RankMismatchError(
                f"{text}; they never came. Do all ranks call the model, "
                "state_dict and save together?"
            )
        if waited < warned:
            return warned
        logger.warning(text)
        return warned + WARN_SECONDS


def publish_closed(store: Any, rank: int, why: str = ENDED) -> None:
    """Tell ranks that wait for ``rank`` that it no longer answers, and why."""
    try:
        store.set(_closed(rank), why)
    except RuntimeError:
        pass  # the store is gone: no rank can ask


def leaving(rank: int) -> str:
    """Return the key of a rank that ends its engine, and serves requests until then."""
    return f"leaving/{rank}"


def _closed(rank: int) -> str:
    return f"closed/{rank}"
