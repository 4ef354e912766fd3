"""Progress bars of bytes that are read or written."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
    from tqdm import tqdm

    class ByteBar(tqdm):  # type: ignore[misc, type-arg, unused-ignore]
        monitor_interval = 0  # no thread that redraws it

    lock, delay = threading.Lock(), 0.0 if progress else SHOWN_AFTER
    with ByteBar(desc=what, total=total, unit="B", unit_scale=True, delay=delay) as shown:

        def advance(count: int) -> None:
            with lock:
                shown.update(count)

        yield advance
