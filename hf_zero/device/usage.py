"""Bytes of a device: free, in use, peak in use.

Not for the host, whose memory hf_zero.device.free_memory measures.
"""

from __future__ import annotations

import torch

from hf_zero.device import kinds


def allocated(device: torch.device) -> int:
    """Return the bytes of tensors of this process."""
    return int(kinds.module_of(device).memory_allocated(device))


def most_allocated(device: torch.device) -> int:
    """Return the peak of :func:`allocated` since the process began, or since its last reset."""
    return int(kinds.module_of(device).max_memory_allocated(device))


def _had(device: torch.device) -> int:
    module = kinds.module_of(device)
    return int(module.mem_get_info(device)[0]) + int(module.memory_reserved(device))


def free(device: torch.device) -> int:
    """Return the bytes that this process may still take, including torch's unused cache."""
    return _had(device) - allocated(device)


def free_at_the_peak(device: torch.device) -> int:
    """Return the bytes of :func:`free` at the peak of use."""
    return _had(device) - most_allocated(device)
