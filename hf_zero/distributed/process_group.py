"""The default process group: ranks, devices and the backends that serve them."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from hf_zero.device import kinds


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_rank(group: Any = None) -> int:
    return dist.get_rank(group) if is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    return dist.get_world_size(group) if is_initialized() else 1


def get_local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", get_rank()))


def destroy_process_group() -> None:
    if is_initialized():
        dist.destroy_process_group()


_chosen: torch.device | None = None


def choose_device(device: torch.device | None) -> None:
    """Compute on ``device`` in this process, for a trainer that has decided it by itself; None:
    as the launcher says.
    """
    global _chosen
    _chosen = device


def default_device() -> torch.device:
    """The device this rank computes on: its own GPU where the launcher or DS_ACCELERATOR has not
    forced the CPU, else the CPU.
    """
    if _chosen is not None:
        return _chosen
    forced = (
        os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes")
        or os.environ.get("DS_ACCELERATOR", "").lower() == "cpu"
    )
    kind = None if forced else kinds.accelerator()
    if kind is not None:
        return torch.device(kind, get_local_rank() % kinds.device_count())
    return torch.device("cpu")


def backend_for(device: torch.device | str) -> str:
    """The backend of torch.distributed for this kind of device: "nccl" on CUDA, "gloo" on the
    host.
    """
    return "gloo" if kinds.is_host(device) else dist.get_default_backend_for_device(device)


def backends_for(device: torch.device) -> str:
    """What a process group is made with: the backend of ``device``, and one for what lies in
    host memory.
    """
    return "gloo" if kinds.is_host(device) else f"cpu:gloo,{device.type}:{backend_for(device)}"


def group_backend(device: torch.device) -> str:
    """The backend that serves ``device``: "gloo", "nccl", "threaded", "fake"."""
    return backend_serving(device) or str(dist.get_backend())


def backend_serving(device: torch.device) -> str:
    """The backend of the process group for tensors on ``device``; "" where there is none."""
    for entry in str(dist.get_backend_config()).split(","):
        kind, _, name = entry.strip().rpartition(":")
        if kind in ("", device.type):
            return name
    return ""
