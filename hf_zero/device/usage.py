"""Bytes of a device: free, in use, at most in use.

None of these is asked of the host, whose memory is counted by hf_zero.device.free_memory.
"""

from __future__ import annotations

import torch

from hf_zero.device import kinds


def allocated(device: torch.device) -> int:
    """Bytes of tensors of this process."""
    return int(kinds.module_of(device).memory_allocated(device))


def most_allocated(device: torch.device) -> int:
    """The most of :func:`allocated` since the process began, or since the peak was reset."""
    return int(kinds.module_of(device).max_memory_allocated(device))


def _had(device: torch.device) -> int:
    module = kinds.module_of(device)
    return int(module.mem_get_info(device)[0]) + int(module.memory_reserved(device))


def free(device: torch.device) -> int:
    """Bytes that this process may still take, with what torch holds unused."""
    return _had(device) - allocated(device)


def free_at_the_peak(device: torch.device) -> int:
    """As :func:`free`, at the moment when most was in use."""
    return _had(device) - most_allocated(device)
