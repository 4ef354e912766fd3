"""Aborts of process groups, after which their waits raise."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from hf_zero.distributed.process_group import CPU
from hf_zero.logging import logger

BREAK_TAG = 0x7FFFFFFF
ABORT_SECONDS = 30.0  # longest wait for aborts


def abort(group: dist.ProcessGroup | None, backend: str, device: torch.device) -> None:
    """Make all waits in ``group`` raise, on this rank and on its other ranks."""
    assert group is not None  # a dimension of one rank has none, and no waits
    if backend != "gloo":
        group._get_backend(device).abort()
        return
    gloo = group._get_backend(CPU)
    for peer in range(gloo.size()):
        if peer != gloo.rank():
            try:  # gloo closes connections only when a message on them has timed out
                work = gloo.recv([torch.empty(1)], peer, BREAK_TAG)  # type: ignore[attr-defined]
                work.wait(timedelta(milliseconds=1))
            except RuntimeError:
                pass  # the time-out is the purpose


def abort_together(aborts: Mapping[str, Callable[[], None]]) -> None:
    """Call ``aborts``, by name of communicator, concurrently; return when they have ended or after
    :data:`ABORT_SECONDS`. An exception of one is logged and does not stop the others.

    In sequence they might never end: NCCL frees memory in an abort, for which the driver waits
    until the device is idle, and a collective on a communicator that is still to be aborted never
    ends.
    """
    under_way = []
    for item in aborts.items():
        thread = threading.Thread(target=_try, args=item, name="hf_zero-abort", daemon=True)
        try:
            thread.start()
            under_way.append(thread)
        except RuntimeError:  # the interpreter is shutting down and starts no thread
            _try(*item)
    limit = time.monotonic() + ABORT_SECONDS
    for thread in under_way:
        thread.join(max(0.0, limit - time.monotonic()))


def _try(name: str, abort: Callable[[], None]) -> None:
    try:
        abort()
    except Exception:
        logger.exception("could not abort %s", name)
