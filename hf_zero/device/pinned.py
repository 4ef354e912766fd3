"""Host memory that a device copies to and from by itself while it computes.

CUDA and ROCm pin pages that are there already (``cudaHostRegister``): exact in size, on the NUMA
node that was chosen. Other kinds give pinned memory by torch's own allocator only.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from hf_zero.device import kinds

_PORTABLE = 1  # of cudaHostRegister: pinned for all contexts


def registers(device: torch.device) -> bool:
    """Whether the runtime of ``device`` pins pages that are there already."""
    return not kinds.is_host(device) and hasattr(kinds.module_of(device), "cudart")


def register(device: torch.device, address: int, nbytes: int) -> tuple[int, Any]:
    """Pin pages for ``device``: the runtime's error or 0, and what undoes it, called with the
    address.
    """
    runtime: Any = kinds.module_of(device).cudart()
    with kinds.current(device):
        error = int(runtime.cudaHostRegister(address, nbytes, _PORTABLE))
    if error:
        _forget_error(device)
    return error, partial(_unregister, device, runtime)


def _unregister(device: torch.device, runtime: Any, address: int) -> None:
    """Undo :func:`register`, in whatever thread the memory dies: one that has not set its device
    would open a context on device 0.
    """
    with kinds.current(device):
        runtime.cudaHostUnregister(address)


def _forget_error(device: torch.device) -> None:
    """CUDA keeps the refusal as its last error and would lay it to the next kernel; torch has no
    call for it but to launch one.
    """
    try:
        torch.zeros(1, device=device)
    except RuntimeError:
        torch.zeros(1, device=device)  # in earnest: the refusal is out of the way


def empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Pinned memory from torch's allocator, rounded up as that does: [numel]."""
    return torch.empty(numel, dtype=dtype, pin_memory=True)


def upload(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return ``tensor`` on ``device``, as :meth:`torch.Tensor.to` gives it; the host does not wait
    for the copy of a dense one in its memory.

    torch keeps the pinned memory until the copy has been made.
    """
    device = torch.device(device)
    dense_here = tensor.device.type == "cpu" and tensor.layout is torch.strided
    if not kinds.is_host(device) and dense_here and not tensor.is_pinned():
        # not pin_memory(), which keeps the strides, and refuses those of expanded tensors
        tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True)
