"""Pinned host memory, which a device copies to and from while it computes.

CUDA and ROCm pin existing pages (``cudaHostRegister``): exact in size, on a chosen NUMA node. Other
kinds allocate pinned memory only by torch's own allocator.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from hf_zero.device import kinds

_PORTABLE = 1  # cudaHostRegister's flag: pinned for all contexts


def registers(device: torch.device) -> bool:
    """Return whether the runtime of ``device`` pins existing pages."""
    return not kinds.is_synchronous(device) and hasattr(kinds.module_of(device), "cudart")


def register(device: torch.device, address: int, nbytes: int) -> tuple[int, Any]:
    """Pin pages for ``device``. Return the runtime's error or 0, and the function that unpins them,
    to be called with the address.
    """
    runtime: Any = kinds.module_of(device).cudart()
    with kinds.device_guard(device):
        error = int(runtime.cudaHostRegister(address, nbytes, _PORTABLE))
    if error:
        _forget_error(device)
    return error, partial(_unregister, device, runtime)


def _unregister(device: torch.device, runtime: Any, address: int) -> None:
    """Undo :func:`register`, in whatever thread the memory dies: one that has not set its device
    would open a context on device 0.
    """
    with kinds.device_guard(device):
        runtime.cudaHostUnregister(address)


def _forget_error(device: torch.device) -> None:
    """Clear CUDA's last error: it would be reported by the next kernel, and torch has no call for
    it but a launch.
    """
    try:
        torch.zeros(1, device=device)
    except RuntimeError:
        torch.zeros(1, device=device)  # the refusal is cleared: an error now is a real one


def empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return pinned memory from torch's allocator, rounded up by it: [numel]."""
    return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)


def upload(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return ``tensor`` on ``device``, like :meth:`torch.Tensor.to`; the host does not wait for the
    copy of a dense tensor in its memory.

    torch keeps the pinned memory until the copy is complete.
    """
    device = torch.device(device)
    dense_here = tensor.device.type == "cpu" and tensor.layout is torch.strided
    waits = kinds.is_synchronous(device)  # a temporary of the caller may be gone before a late copy
    if not waits and dense_here and not tensor.is_pinned():
        # not pin_memory(), which keeps the strides, and rejects those of expanded tensors
        tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=not waits)
