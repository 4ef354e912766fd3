"""Silent waits made audible: a warning each minute that says what this rank waits for."""

from __future__ import annotations

import threading
import time
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

    @contextmanager
    def over(self, what: str) -> Iterator[None]:
        """Mark the enclosed block as waiting for ``what``."""
        if not self._enabled:
            yield
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hf_zero-watch", daemon=True)
            self._thread.start()
        self._current = (what, time.monotonic())
        try:
            yield
        finally:
            self._current = None

    def close(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        told: tuple[str, float] | None = None
        warned = 0.0
        while not self._stop.wait(min(1.0, self._warn_after / 4)):
            current = self._current
            if current is None:
                continue
            waited = time.monotonic() - current[1]
            if current != told:
                told, warned = current, 0.0
            if waited - warned >= self._warn_after:
                warned = waited
                logger.warning(
                    "waiting for %s since %.0f s: another rank has not joined it (is it dead, or elsewhere in the script?)",
                    current[0],
                    waited,
                )
