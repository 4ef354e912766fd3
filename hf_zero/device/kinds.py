"""The kind of device that computes, and its capabilities.

A kind is the name of a device type: "cuda" (CUDA and ROCm), "xpu", "npu", the name of a PrivateUse1
backend. torch's functions for a kind are in the module ``torch.<kind>``, with the same names for
all. Importing this module initializes no device.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

IN_HOST_MEMORY = frozenset({"cpu", "meta"})
COPIES = frozenset({"cpu", "cuda", "xpu"})  # tensor methods that copy to a kind of device
TRITON = frozenset({"cuda"})  # kinds supported by kernels/gpu
FLASH = frozenset({"cuda"})  # kinds with torch's flash and memory-efficient attention


@functools.cache
def drives_streams(kind: str) -> bool:
    """Return whether this kind of device has streams and events, and a current device that threads
    set; some releases of torch give MPS streams and events only.
    """
    module = getattr(torch, kind, None)
    names = ("Stream", "Event", "stream", "current_stream", "set_device")
    return kind not in IN_HOST_MEMORY and all(hasattr(module, name) for name in names)


def is_synchronous(device: torch.device | str) -> bool:
    """Return whether work on ``device`` is synchronous with the host: CPU, meta, MPS."""
    return not drives_streams(device if isinstance(device, str) else device.type)


def module_of(device: torch.device | str) -> Any:
    """Return torch's module for ``device``'s kind: ``torch.cuda``, ``torch.xpu``, ``torch.cpu``."""
    return torch.get_device_module(device)


def accelerator() -> str | None:
    """Return the kind of accelerator of this machine; None if it has only a CPU."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return device.type if device is not None and not is_synchronous(device) else None


def initialized_accelerator() -> str | None:
    """Return the kind of :func:`accelerator` if this process has initialized it, else None."""
    kind = accelerator()
    return kind if kind is not None and module_of(kind).is_initialized() else None


def device_for_estimate(gpu: bool) -> torch.device:
    """Return the device of an estimate, whether or not this machine has one: a GPU, or the CPU."""
    return torch.device("cuda" if gpu else "cpu")


def autocast_dtype(kind: str) -> torch.dtype | None:
    """Return the dtype of the autocast that is on for this kind of device, None if none is."""
    # torch.compile of torch 2.11 does not trace torch.amp.is_autocast_available
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def device_count() -> int:
    """Return the number of accelerators visible to this process."""
    kind = accelerator()
    return int(module_of(kind).device_count()) if kind is not None else 0


def current_index(device: torch.device | str) -> int:
    """Return the index of this thread's current device of this kind; 0 on the host."""
    return 0 if is_synchronous(device) else int(module_of(device).current_device())


def set_device(device: torch.device) -> None:
    """Make ``device`` this thread's current one.

    A new thread begins with device 0, and its first call opens a context there.
    """
    if not is_synchronous(device) and device.index is not None:
        module_of(device).set_device(device)


def device_guard(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context manager that makes ``device`` this thread's current one."""
    if is_synchronous(device):
        return nullcontext()
    inside: AbstractContextManager[object] = module_of(device).device(device)
    return inside


def synchronize(device: torch.device) -> None:
    """Return when ``device`` has completed all work launched on it, on every stream."""
    if not is_synchronous(device):
        module_of(device).synchronize(device)


def properties(device: torch.device) -> Any:
    """Return the driver's properties of ``device``: name, total_memory, and others of its kind."""
    return module_of(device).get_device_properties(device)


def runs_triton(device: torch.device | str) -> bool:
    """Return whether the kernels of kernels/gpu are compiled for this kind."""
    return (device if isinstance(device, str) else device.type) in TRITON


def is_nvidia(device: torch.device) -> bool:
    """Return whether ``device`` is driven by CUDA itself, not by ROCm under its name."""
    return device.type == "cuda" and torch.version.hip is None


def has_float8(device: torch.device) -> bool:
    """Return whether the device has instructions that multiply matrices of 8-bit floats."""
    return is_nvidia(device) and torch.cuda.get_device_capability(device) >= (8, 9)
