"""A store that is asked with patience: a host that is cut off must not hold up whoever would tell
of it.

torch's client of the store blocks in native code for as long as the network lets it, whatever
timeout it was given.
"""

from __future__ import annotations

import queue
import threading
import weakref
from typing import Any

SECONDS = 5.0


class PatientStore:
    """The calls of ``store`` that posts need, each from one thread and for ``seconds`` at most;
    RuntimeError when it does not answer.
    """

    def __init__(self, store: Any, seconds: float = SECONDS):
        self._store = store
        self._seconds = seconds
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._lost = False
        # the thread ends with this object, if it is not held up itself
        weakref.finalize(self, self._calls.put, None)

    def set(self, key: str, value: str) -> None:
        self._ask("set", key, value)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys))

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
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
        if not call.done.wait(self._seconds):
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
