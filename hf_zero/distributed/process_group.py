"""The default process group: its ranks, plain collectives over all of them, the device of this
rank, and the destruction of groups.
"""

from __future__ import annotations

import os
from typing import Protocol

import torch
import torch.distributed as dist

from hf_zero.device import kinds
from hf_zero.distributed.rendezvous import local_rank_told

CPU = torch.device("cpu")


class Waitable(Protocol):
    """A message or collective in flight, as torch's ``Work``."""

    def wait(self) -> object: ...


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    return dist.get_rank(group) if is_initialized() else 0


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    return dist.get_world_size(group) if is_initialized() else 1


def get_local_rank(rank: int | None = None) -> int:
    """Return the number of this rank on its host: LOCAL_RANK, or else ``rank``, by default that in
    the process group. Raises LaunchError if LOCAL_RANK is no number.
    """
    local = local_rank_told(os.environ)
    if local is not None:
        return local
    return get_rank() if rank is None else rank


def default_store() -> dist.Store:
    """Return the store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def all_reduce(tensor: torch.Tensor) -> None:
    """Replace ``tensor`` by its sum over all ranks, by torch's own collective alone."""
    if get_world_size() > 1:
        dist.all_reduce(tensor)


def broadcast(tensor: torch.Tensor, source: int) -> None:
    """Copy rank ``source``'s ``tensor`` to all ranks, by torch's own collective alone."""
    if get_world_size() > 1 and tensor.numel():
        dense = tensor.detach().contiguous()
        dist.broadcast(dense.view(-1).view(torch.uint8), source)  # gloo sends no bool
        if dense.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(dense)


def barrier() -> None:
    """Wait for all ranks, by torch's own collective alone."""
    if get_world_size() > 1:
        dist.barrier()


def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
    if is_initialized():
        dist.destroy_process_group(group)


def destroy_if_current(group: object) -> None:
    """Destroy a process group of the current job; do nothing for None or a former job's group."""
    if group is not None and dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)


_chosen: torch.device | None = None


def choose_device(device: torch.device | None) -> None:
    """Use ``device`` here, for a trainer that chooses it itself; None: the launcher decides."""
    global _chosen
    _chosen = device


def chosen_device() -> torch.device | None:
    """Return the device of :func:`choose_device`; None if the launcher decides."""
    return _chosen


def default_device(rank: int | None = None) -> torch.device:
    """Return the device of this rank: its own GPU, or the CPU if there is none or if the launcher
    or DS_ACCELERATOR forces it. ``rank``: the number of this rank before there is a process group.
    """
    if _chosen is not None:
        return _chosen
    forced = (
        os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes")
        or os.environ.get("DS_ACCELERATOR", "").lower() == "cpu"
    )
    kind = None if forced else kinds.accelerator()
    if kind is not None:
        return torch.device(kind, get_local_rank(rank) % kinds.device_count())
    return CPU
