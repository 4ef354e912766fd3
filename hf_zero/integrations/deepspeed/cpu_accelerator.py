"""What ``torch.cuda`` answers about a GPU, answered about the CPU: seeds, and this process's
memory. The rest is torch.cpu's.
"""

from __future__ import annotations

import resource
import sys
from typing import Any

import psutil
import torch
from torch import get_rng_state as get_rng_state
from torch import set_rng_state as set_rng_state


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


manual_seed_all = manual_seed


def memory_allocated(device_index: int | None = None) -> int:
    """Bytes of this process that lie in memory, libraries included."""
    resident: int = psutil.Process().memory_info().rss
    return resident


def max_memory_allocated(device_index: int | None = None) -> int:
    """The most of :func:`memory_allocated` since the process began."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    return max(peak, memory_allocated())  # the kernel counts the peak a little late


def reset_peak_memory_stats(device_index: int | None = None) -> None:
    """The system does not forget a process's peak."""


def mem_get_info(device_index: int | None = None) -> tuple[int, int]:
    """Bytes that are free, and all, on this machine."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def __getattr__(name: str) -> Any:
    return getattr(torch.cpu, name)
