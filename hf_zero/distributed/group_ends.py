"""The ends of process groups: aborted, so that what waits in them raises, or destroyed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")
BREAK_TAG = 0x7FFFFFFF


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


def destroy_group(group: Any) -> None:
    """Destroy a process group of the job there is; None, or one of a former job: do nothing."""
    if group is not None and dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)
