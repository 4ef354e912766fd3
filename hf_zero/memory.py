"""How much memory this process may still take."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))  # versions 2 and 1


def free_bytes(device: torch.device) -> int:
    """Bytes that are free on ``device`` for this rank: on a GPU with what torch holds unused, on the CPU its share of the machine's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    free = psutil.virtual_memory().available
    for limit, used in _CGROUP_FILES:
        try:
            free = min(free, int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text()))
        except (OSError, ValueError):  # no such version, or no limit: the word "max"
            continue
    return max(0, free) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
