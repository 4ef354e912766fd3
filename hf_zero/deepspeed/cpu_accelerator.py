"""What ``torch.cuda`` answers about a GPU, answered about the CPU: seeds, and this process's
memory. The rest is torch.cpu's.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import get_rng_state as get_rng_state
from torch import initial_seed as initial_seed

NODES = Path("/sys/devices/system/node")
Event = None  # timers use the clock of the host
default_stream = torch.cpu.current_stream


def device_count() -> int:
    """The ranks of this host (LOCAL_SIZE); without a launcher its NUMA nodes that have cores."""
    ranks = int(os.environ.get("LOCAL_SIZE") or 0)
    if ranks > 0:
        return ranks
    lists = [path.read_text().strip() for path in NODES.glob("node[0-9]*/cpulist")]
    return sum(map(bool, lists)) or 1


def default_generator(device_index: int | None = None) -> torch.Generator:
    return torch.default_generator


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


manual_seed_all = manual_seed


def set_rng_state(new_state: torch.Tensor, device_index: int | None = None) -> None:
    torch.set_rng_state(new_state)


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


memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def memory_stats(device_index: int | None = None) -> dict[str, int]:
    """As torch.cuda.memory_stats has them by name: bytes now and at most."""
    return {
        "allocated_bytes.all.current": memory_allocated(),
        "allocated_bytes.all.peak": max_memory_allocated(),
    }


def reset_peak_memory_stats(device_index: int | None = None) -> None:
    """The system does not forget a process's peak."""


def mem_get_info(device_index: int | None = None) -> tuple[int, int]:
    """Bytes that are free, and all, on this machine."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def __getattr__(name: str) -> Any:
    return getattr(torch.cpu, name)
