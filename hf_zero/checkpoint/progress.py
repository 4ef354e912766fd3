"""A progress bar in bytes for long file operations."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Tick = Callable[[int], None]


SHOWN_AFTER = 2.0  # seconds before a bar appears that was not asked for


@contextmanager
def progress_bar(progress: bool | None, total: int, what: str) -> Iterator[Tick]:
    """Show a progress bar on stderr and yield the function that advances it by a number of bytes,
    which several threads may call.

    With ``progress`` None the bar is shown only if stderr is a terminal, and only once the work has
    lasted :data:`SHOWN_AFTER` seconds. False shows none.
    """
    if not (sys.stderr.isatty() if progress is None else progress):
        yield lambda count: None
        return
    shown = _Bar(total, what, time.monotonic() + (0.0 if progress else SHOWN_AFTER))
    try:
        if progress:
            shown.advance(0)
        yield shown.advance
    finally:
        shown.stop()


class _Bar:
    """A bar that appears at the time ``since`` (``time.monotonic``)."""

    def __init__(self, total: int, what: str, since: float) -> None:
        self._total, self._what, self._since = total, what, since
        self._done = 0
        self._live: Any = None
        self._lock = threading.Lock()

    def advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._live is None and time.monotonic() >= self._since:
                self._live = self._start()
            if self._live is not None:
                self._live.update(self._task, completed=self._done)

    def _start(self) -> Any:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        live = Progress(*columns, console=Console(stderr=True))
        live.start()
        self._task = live.add_task(self._what, total=self._total)
        return live

    def stop(self) -> None:
        with self._lock:
            if self._live is not None:
                self._live.stop()
