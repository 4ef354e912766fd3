"""Host tensors that are not paged out, as DeepSpeed's operator ``pin_memory`` makes them."""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

from hf_zero.config.value_types import argument, integer
from hf_zero.device import kinds
from hf_zero.distributed import process_group
from hf_zero.errors import HostMemoryError

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mlock.argtypes = _LIBC.munlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class PinHandle:
    """Make and free host tensors: pinned for the device, or locked if the device is the host."""

    def __init__(self) -> None:
        self._made: dict[int, torch.Tensor] = {}

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Return ``num_elem`` zeros in the dtype of ``example_tensor``, 1-D. Raises HostMemoryError
        if the system does not lock that much, and ConfigError for no number of elements.
        """
        count = argument("new_cpu_locked_tensor", "num_elem", integer(1), num_elem)
        dtype, device = example_tensor.dtype, process_group.default_device()
        if kinds.is_synchronous(device):
            tensor = _locked(count, dtype)
        else:
            tensor = torch.zeros(count, dtype=dtype, pin_memory=True)
        self._made[tensor.data_ptr()] = tensor
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is within a tensor of this handle, or is pinned by torch."""
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        inside = (at <= start and stop <= at + locked.nbytes for at, locked in self._made.items())
        return any(inside) or bool(tensor.is_pinned())

    def free_cpu_locked_tensor(self, locked_tensor: torch.Tensor) -> bool:
        """Unlock the memory, which is freed with the last tensor on it; return False for a tensor
        not made by this handle.
        """
        locked = self._made.pop(locked_tensor.data_ptr(), None)
        if locked is not None and not locked.is_pinned():
            _LIBC.munlock(locked.data_ptr(), locked.nbytes)
        return locked is not None


def _locked(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return ``count`` zeros in memory that is locked."""
    nbytes = count * dtype.itemsize
    try:
        tensor = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=dtype, count=count)
        if _LIBC.mlock(tensor.data_ptr(), nbytes):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    except (OSError, OverflowError) as error:
        raise HostMemoryError(
            f"{nbytes:,} bytes could not be locked in memory ({error}); raise the limit "
            "(ulimit -l), or use plain tensors"
        ) from None
    return tensor


pin_handle: object = PinHandle


def get_active_native_pinned_memory() -> None:
    """Return None: torch pins the buffers of the engine and of ``get_accelerator().pin_memory``,
    and frees them with their tensors, whatever DS_PIN_MEMORY_BACKEND says.
    """
