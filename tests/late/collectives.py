"""Process groups of the device: the backend "late", or "nccl" where it poses as CUDA."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tests.late.device import AS_CUDA, NAME, C

_made = 0


def _communicator(store: Any, rank: int, size: int, timeout: Any, high: bool = False) -> Any:
    name, board = _board(store, rank, size)
    made = C.communicator(
        dist.ProcessGroupGloo(store, rank, size, timeout=timeout), name, str(board), high
    )
    if store.add("late opened", 1) == size:  # its pages live on in those who have mapped them
        board.unlink()
    return made


def _board(store: Any, rank: int, size: int) -> tuple[str, Path]:
    """The name of a new communicator, and the file that its ranks share."""
    global _made
    if rank == 0:
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        file, path = tempfile.mkstemp(prefix="late-board-", dir=folder)
        os.ftruncate(file, C.board_bytes(size))
        os.close(file)
        _made += 1
        process = os.environ.get("RANK", rank)
        store.set("late board", f"communicator {_made} made by rank {process} for {size}|{path}")
    name, _, path = store.get("late board").decode().partition("|")
    return name, Path(path)


class _IsOurs(type):
    def __instancecheck__(cls, made: Any) -> bool:
        return isinstance(made, torch._C._distributed_c10d.Backend) and made.name() == "late"


class _Options:
    def __init__(self, is_high_priority_stream: bool = False):
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout: Any = None


class _Nccl(metaclass=_IsOurs):
    """In the place of ProcessGroupNCCL."""

    Options = _Options

    def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
        high = options.is_high_priority_stream
        return _communicator(store, rank, size, options._timeout, high)


def register() -> None:
    if not AS_CUDA:
        dist.Backend.register_backend("late", _communicator, devices=[NAME])
        return
    dist.ProcessGroupNCCL = c10d.ProcessGroupNCCL = _Nccl  # type: ignore[misc, assignment]
    c10d._NCCL_AVAILABLE = True
    torch.cuda.nccl.version = lambda: (2, 27, 0)  # what torch's log of collectives asks for
    for module in (dist, c10d):
        module.is_nccl_available = lambda: True
    torch._C._distributed_c10d.Backend._set_sequence_number_for_group = lambda self: None
