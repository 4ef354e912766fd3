"""The ends of process groups: aborted, so that what waits in them raises, or destroyed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hf_zero.logging import logger

CPU = torch.device("cpu")
BREAK_TAG = 0x7FFFFFFF
ABORT_SECONDS = 30.0  # that aborts are waited for


def abort(group: Any, backend: str, size: int, rank: int, device: torch.device) -> None:
    """Make everything that waits in ``group`` raise, here and on its other ranks."""
    if backend != "gloo":
        group._get_backend(device).abort()
        return
    gloo = group._get_backend(CPU)
    for peer in range(size):
        if peer != rank:
            try:  # gloo closes the connections of a message that has timed out, and of nothing else
                gloo.recv([torch.empty(1)], peer, BREAK_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError:
                pass  # as wanted


def abort_together(aborts: Mapping[str, Callable[[], None]]) -> None:
    """Call ``aborts``, by name of communicator, all at once, and return when they have ended or
    :data:`ABORT_SECONDS` are over. What one raises is logged, and keeps no other from it.

    One after the other they may not end: NCCL gives memory back in an abort, for which the driver
    waits until the device is idle, and a collective on a communicator whose abort is yet to come
    never ends.
    """
    under_way = []
    for each in aborts.items():
        thread = threading.Thread(target=_try, args=each, name="hf_zero-abort", daemon=True)
        try:
            thread.start()
            under_way.append(thread)
        except RuntimeError:  # the interpreter shuts down, and starts none
            _try(*each)
    limit = time.monotonic() + ABORT_SECONDS
    for thread in under_way:
        thread.join(max(0.0, limit - time.monotonic()))


def _try(name: str, abort: Callable[[], None]) -> None:
    try:
        abort()
    except Exception:
        logger.exception("could not abort %s", name)


def destroy_group(group: Any) -> None:
    """Destroy a process group of the job there is; None, or one of a former job: do nothing."""
    if group is not None and dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)
