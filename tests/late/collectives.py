"""Process groups of the device: the backend "late", or "nccl" where it poses as CUDA."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tests.late.device import AS_CUDA, NAME, C


def _communicator(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return C.communicator(dist.ProcessGroupGloo(store, rank, size, timeout=timeout))


class _IsOurs(type):
    def __instancecheck__(cls, made: Any) -> bool:
        return isinstance(made, torch._C._distributed_c10d.Backend) and made.name() == "late"


class _Options:
    is_high_priority_stream = False

    def __init__(self, *_: Any, **__: Any):
        self._timeout = None


class _Nccl(metaclass=_IsOurs):
    """In the place of ProcessGroupNCCL."""

    Options = _Options

    def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
        return _communicator(store, rank, size, options._timeout)


def register() -> None:
    if not AS_CUDA:
        dist.Backend.register_backend("late", _communicator, devices=[NAME])
        return
    c10d.ProcessGroupNCCL = _Nccl  # type: ignore[misc, assignment]
    c10d._NCCL_AVAILABLE = True
    for module in (dist, c10d):
        module.is_nccl_available = lambda: True
    torch._C._distributed_c10d.Backend._set_sequence_number_for_group = lambda self: None
