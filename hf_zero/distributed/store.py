"""The job's key-value store with a time limit on every call, and messages between ranks through it.

torch's client of the store blocks in native code as long as the network lets it, whatever timeout
it was given: :class:`TimeoutStore` calls it on another thread. :class:`StoreMessages` lets
background threads of different ranks exchange results without a collective, which could match one
of the training.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from hf_zero.errors import RankMismatchError

TIMEOUT_SECONDS = 5.0
SLICES = 20  # parts of such a wait
FIRST_PAUSE, LAST_PAUSE = 0.002, 0.25  # seconds between polls
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
                    f"rank {rank} did not say what came of it: {gone}; its own output says more"
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
