"""Ranks that are threads of a test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any


def on_threads(calls: Sequence[Callable[[], Any]], timeout: float = 120.0) -> list[Any]:
    """The results of ``calls``, on a thread each; fails where one hangs."""
    answers: list[Any] = [None] * len(calls)

    def run(at: int) -> None:
        answers[at] = calls[at]()

    threads = [threading.Thread(target=run, args=(at,), daemon=True) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
        assert not thread.is_alive(), "a rank hangs"
    return answers


class Later:
    """A call on a thread of its own, in ``result`` once it has returned."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.result: Any = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.result = self._call()

    def waits(self, seconds: float = 0.05) -> bool:
        """Whether it has not returned after ``seconds``."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def end(self) -> Any:
        self._thread.join(60)
        assert not self._thread.is_alive(), "a call hangs"
        return self.result
