"""``deepspeed.utils.logging``: messages of chosen ranks, through hf-zero's logger, which gets the
methods that scripts call on DeepSpeed's.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Sequence
from typing import Any

import psutil

from hf_zero.deepspeed.accelerator import get_accelerator
from hf_zero.distributed import process_group
from hf_zero.errors import ConfigError
from hf_zero.logging import logger, set_level

LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")}
LEVELS["critical"] = logging.CRITICAL
GIB = 1 << 30
_warned: set[str] = set()


Ranks = int | Sequence[int] | None


def _listed(ranks: Ranks) -> tuple[int, ...]:
    return (ranks,) if isinstance(ranks, int) else tuple(ranks or ())


def _logs_here(ranks: Ranks) -> bool:
    if not process_group.is_initialized():
        return True
    return not {-1, process_group.get_rank()}.isdisjoint(_listed(ranks))


def log_dist(message: str, ranks: Ranks = None, level: int = logging.INFO) -> None:
    """Log on the given ranks; ``[-1]``: on all of them.

    Without a list no rank logs once there is a process group, as in DeepSpeed.
    """
    if _logs_here(ranks):
        logger.log(level, message)


def print_dist(message: str, ranks: Ranks = None) -> None:
    """Print on the ranks of :func:`log_dist`, whatever the level of logging is."""
    if _logs_here(ranks):
        print(message)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log on rank 0 the memory of this process and its machine; only with ``force``, as scripts are
    full of these calls.
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


def warning_once(message: str, *args: object, **kwargs: Any) -> None:
    """Log a warning, formatted with ``args``, that was not logged before."""
    text = message % args if args else message
    if text not in _warned:
        _warned.add(text)
        logger.warning("%s", text, **kwargs)


@functools.cache
def _log_once(message: str, ranks: tuple[int, ...], level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Ranks = None, level: int = logging.INFO) -> None:
    """Run :func:`log_dist` unless it has run with the same arguments."""
    _log_once(message, _listed(ranks), level)


# scripts call them on the logger, under these names
logger.warning_once = warning_once  # type: ignore[attr-defined]
logger.log_dist_once = log_dist_once  # type: ignore[attr-defined]


def get_log_level_from_string(log_level_str: str) -> int:
    """Return the level. Raises ConfigError for an unknown one."""
    level = LEVELS.get(str(log_level_str).lower())
    if level is None:
        raise ConfigError(f"{log_level_str!r} is not a level of logging; write one of {[*LEVELS]}")
    return level


def set_log_level_from_string(
    log_level_str: str, custom_logger: logging.Logger | None = None
) -> None:
    """Set the level of hf-zero's logger, or of ``custom_logger``, and of its handlers."""
    set_level(get_log_level_from_string(log_level_str), custom_logger or logger)


def should_log_le(max_log_level_str: str) -> bool:
    """Return whether messages of this level are logged now."""
    return logger.getEffectiveLevel() <= get_log_level_from_string(max_log_level_str)
