"""``log_dist``, ``print_dist`` and the like: messages of chosen ranks, through hf-zero's logger."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence

import psutil

from hf_zero.distributed import process_group
from hf_zero.integrations.deepspeed.accelerator import get_accelerator
from hf_zero.logs import logger

GIB = 1 << 30


def _logs_here(ranks: Sequence[int] | None) -> bool:
    return not process_group.is_initialized() or (
        bool(ranks) and (-1 in (ranks or ()) or process_group.get_rank() in (ranks or ()))
    )


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on the given ranks; ``[-1]``: on all of them.

    Without a list no rank logs once there is a process group, as in DeepSpeed.
    """
    if _logs_here(ranks):
        logger.log(level, message)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """As :func:`log_dist`, printed whatever the level of logging is."""
    if _logs_here(ranks):
        print(message)


def print_rank_0(message: str) -> None:
    if process_group.get_rank() == 0:
        print(message)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log on rank 0 what this process and its machine hold now; only with ``force``, as scripts
    are full of these calls.
    """
    if not force or process_group.get_rank() != 0:
        return
    gc.collect()
    device, machine = get_accelerator(), psutil.virtual_memory()
    logger.info(
        "%s: %s %.2f GiB now, %.2f GiB at most; machine %.2f GiB used (%.0f%%)",
        message,
        device.device_name(),
        device.memory_allocated() / GIB,
        device.max_memory_allocated() / GIB,
        (machine.total - machine.available) / GIB,
        machine.percent,
    )
    device.reset_peak_memory_stats()
