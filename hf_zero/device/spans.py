"""Named spans of a step in a profile, and a debug log of the step's order.

    with span("all_gather", unit.label, nbytes):
        ...

Under ``torch.profiler`` the block is a ``record_function`` named ``hf_zero::all_gather layers.3``.
With ``HF_ZERO_LOG_LEVEL=steps`` its end is logged on rank 0 (``steps:all``: on every rank), with
its bytes and the milliseconds that the host spent in it; the profile shows what the device does
meanwhile. With neither, ``span`` returns one shared object that does nothing. The profiler records
the threads that it was started for: the main thread and autograd's, not the threads of offloaded
updates.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler

from hf_zero.logging import STEPS, asked_level, logger

_started = time.perf_counter()
NOTHING: nullcontext[None] = nullcontext()  # one object for all blocks without a context
# called with each operation and unit, when a block begins and when any span ends (True: ends)
Watcher = Callable[[str, str, bool], None]
# forwards and backwards under way, by id: operation, block, begin, span in a trace
_open: dict[int, tuple[str, str, float, Any]] = {}


class _Span:
    def __init__(self, what: str, unit: str, nbytes: int):
        self._what, self._unit, self._nbytes = what, unit, nbytes
        self._record: Any = None

    def __enter__(self) -> None:
        if profiler._is_profiler_enabled:
            self._record = torch.profiler.record_function(f"hf_zero::{self._what} {self._unit}")
            self._record.__enter__()
        self._began = time.perf_counter()

    def __exit__(self, *raised: object) -> None:
        if self._record is not None:
            self._record.__exit__(*raised)
        if logs:
            _log(self._what, self._unit, self._nbytes, self._began)


def span(what: str, unit: str, nbytes: int = 0) -> _Span | nullcontext[None]:
    """Return a context manager around the operation ``what`` on ``nbytes`` bytes of ``unit``."""
    return _Span(what, unit, nbytes) if logs or profiler._is_profiler_enabled else NOTHING


def began(owner: object, what: str, unit: str) -> None:
    """Record that the block ``owner`` begins ``what``, a forward or backward; :func:`ended` ends
    it.

    Call it if ``blocks`` is true.
    """
    record = None
    if profiler._is_profiler_enabled:
        record = torch.profiler.record_function(f"hf_zero::{what} {unit}")
        record.__enter__()
    if _watcher is not None:
        _watcher(what, unit, False)
    _open[id(owner)] = (what, unit, time.perf_counter(), record)


def ended(owner: object) -> None:
    """End the forward or backward that :func:`began` recorded for ``owner``, if any."""
    if id(owner) in _open:
        what, unit, since, record = _open.pop(id(owner))
        if record is not None:
            record.__exit__(None, None, None)
        if logs:
            _log(what, unit, 0, since)


def show_blocks(on: bool) -> None:
    """Have forwards and backwards of blocks shown in a profile, or in the log alone."""
    global blocks, _shown
    _shown = on
    blocks = logs or on


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Have ``watcher`` called at the beginning of each block's forward and backward, and at the end
    of each span, as (operation, unit, whether it ends), instead of the log.
    """
    global logs, blocks, _watcher
    before, logs, blocks, _watcher = (logs, blocks, _watcher), True, True, watcher
    try:
        yield
    finally:
        logs, blocks, _watcher = before


def _log(what: str, unit: str, nbytes: int, since: float) -> None:
    if _watcher is not None:
        _watcher(what, unit, True)
        return
    if not _everywhere and os.environ.get("RANK", "0") != "0":
        return
    now = time.perf_counter()
    size = f", {nbytes:,} bytes" if nbytes else ""
    logger.debug(
        "%10.3f ms %s %s%s, %.3f ms",
        1e3 * (since - _started),
        what,
        unit,
        size,
        1e3 * (now - since),
    )


def log_steps(how: str) -> None:
    """Log the order of steps for ``steps`` on rank 0, for ``steps:all`` on every rank, and for a
    level of the log not at all.
    """
    global logs, _everywhere, blocks
    logs, _everywhere = how in STEPS, how == "steps:all"
    blocks = logs or _shown
    if logs:
        logger.setLevel(logging.DEBUG)


logs, _everywhere = False, False  # whether ends of spans are logged, and on all ranks
_watcher: Watcher | None = None
blocks, _shown = False, False  # whether blocks are logged or in a profile; in a profile
log_steps(asked_level)
