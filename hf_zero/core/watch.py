"""Silent waits made audible: a warning each minute that says what this rank waits for."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from hf_zero.logs import logger

WARN_SECONDS = 60.0


class Watch:
    """Watches the waits of one rank from a daemon thread, started at the first wait."""

    def __init__(self, enabled: bool = True, warn_after: float = WARN_SECONDS):
        self._enabled = enabled
        self._warn_after = warn_after
        self._current: tuple[str, float] | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._told: tuple[str, float] | None = None
        self._warned = 0.0

    @contextmanager
    def over(self, what: str) -> Iterator[None]:
        """Mark the enclosed block as waiting for ``what``."""
        if not self._enabled:
            yield
            return
        if self._thread is None:
            self._thread = threading.Thread(target=_run, args=(weakref.ref(self), self._stop), name="hf_zero-watch", daemon=True)
            self._thread.start()
        self._current = (what, time.monotonic())
        try:
            yield
        finally:
            self._current = None

    def close(self) -> None:
        self._stop.set()

    @property
    def pause(self) -> float:
        """Seconds between looks."""
        return min(1.0, self._warn_after / 4)

    def look(self) -> None:
        """Warn if the wait under way has lasted long enough since it began or was last warned of."""
        current = self._current
        if current is None:
            return
        waited = time.monotonic() - current[1]
        if current != self._told:
            self._told, self._warned = current, 0.0
        if waited - self._warned >= self._warn_after:
            self._warned = waited
            logger.warning(
                "waiting for %s since %.0f s: another rank has not joined it (is it dead, or elsewhere in the script?)", current[0], waited
            )


def _run(owner: weakref.ref[Watch], stop: threading.Event) -> None:
    pause = 0.0
    while not stop.wait(pause):
        watch = owner()
        if watch is None:
            return
        watch.look()
        pause = watch.pause
        del watch
