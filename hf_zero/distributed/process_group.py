"""The default process group, its ranks, devices and backends; and the end of any process group:
abort, so that its waits raise, or destruction.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from hf_zero.config.variables import local_world_size
from hf_zero.device import kinds
from hf_zero.distributed.rank_hosts import choose_interface
from hf_zero.distributed.rendezvous import local_rank_told
from hf_zero.errors import ConfigError
from hf_zero.logging import log_rank0, logger


class Waitable(Protocol):
    """A message or collective in flight, as torch's ``Work``."""

    def wait(self) -> object: ...


CPU = torch.device("cpu")
STORELESS = ("threaded", "fake")  # backends whose ranks are threads, or simulated
BREAK_TAG = 0x7FFFFFFF
ABORT_SECONDS = 30.0  # longest wait for aborts
FILES_A_RANK = 16  # connections to each rank in groups of all; on the store's host, its clients
OTHER_FILES = 512


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
            tensor.copy_(dense)


def barrier() -> None:
    """Wait for all ranks, by torch's own collective alone."""
    if get_world_size() > 1:
        dist.barrier()


def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
    if is_initialized():
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
    return torch.device("cpu")


def backend_for(device: torch.device | str) -> str:
    """Return torch.distributed's backend for this kind of device: "gloo" for host memory."""
    return "gloo" if kinds.is_synchronous(device) else dist.get_default_backend_for_device(device)


def backends_for(device: torch.device) -> str:
    """Return the backend string of a process group: the backend of ``device``, and gloo for tensors
    in host memory.
    """
    return (
        "gloo" if kinds.is_synchronous(device) else f"cpu:gloo,{device.type}:{backend_for(device)}"
    )


def backends_asked(backend: str | None, device: torch.device) -> str:
    """Return the backend string of a process group for ``device`` if ``backend`` was asked for. The
    device's backend alone, as Accelerate and scripts write "nccl", would leave out host memory, so
    gloo is added.
    """
    is_default = backend is None or backend.lower() == backend_for(device)
    return backends_for(device) if is_default else str(backend)


def refuse_missing_backends(backend: str) -> None:
    """Raise ConfigError for a process group's backend, or one of ``cpu:gloo,cuda:nccl``, that torch
    does not know, was built without, or has no device for.
    """
    remedy = "leave distributed_backend (init_distributed(backend)) out for that of the device"
    if not isinstance(backend, str):
        raise ConfigError(f"the backend {backend!r} is not a name; {remedy}")
    known = [each for each in dist.Backend.backend_list if each != dist.Backend.UNDEFINED]
    in_pairs = ":" in backend or "," in backend
    for part in backend.lower().split(","):
        name = part.rpartition(":")[2]
        if name not in known or part.count(":") != in_pairs:
            raise ConfigError(
                f"the backend {backend!r} is unknown to torch, which has {', '.join(known)}; "
                f"{remedy}"
            )
        is_built = getattr(dist, f"is_{name}_available", lambda: True)()
        serves = dist.Backend.backend_capability.get(name, [CPU.type])
        if not is_built or not {CPU.type, kinds.accelerator()} & {*serves}:
            lacks = "no device for it is here" if is_built else "torch is built without it"
            raise ConfigError(f"the backend {backend!r} cannot be used: {lacks}; {remedy}")


def allow_connections(world: int) -> None:
    """Raise this process's limit of open files to what ``world`` ranks need, as far as the system
    lets it: gloo keeps a connection to each rank of each group, and the limit is often 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = OTHER_FILES + FILES_A_RANK * world
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < needed:
        log_rank0(
            f"a process here may open {limit} files, and {world} ranks may need {needed} "
            "(connections among them); raise the hard limit (ulimit -Hn) where connections fail "
            "with 'Too many open files'"
        )


def add_host_backend(timeout: timedelta) -> dist.ProcessGroupGloo | None:
    """Add gloo for host memory to the default group if a script has made it for the device alone
    (collective). Return it; None if the group serves host memory, or gloo is not built.
    """
    if backend_serving(CPU) or not dist.is_gloo_available():
        return None
    group = dist.group.WORLD
    assert group is not None
    address = os.environ.get("MASTER_ADDR")
    choose_interface(address, get_world_size() > local_world_size(1))
    store = dist.PrefixStore("hf_zero/host", default_store())
    gloo = dist.ProcessGroupGloo(store, get_rank(), get_world_size(), timeout=timeout)
    gloo._set_sequence_number_for_group()
    group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
    # torch reads the backends of a group from here (get_backend_config)
    configs = dist.distributed_c10d._world.pg_backend_config
    configs[group] = f"{CPU.type}:gloo,{configs[group]}"
    return gloo


def backends_of_parts() -> str | None:
    """Return the backend string for groups of some ranks, so that they serve what the default group
    serves; None if torch derives the same from the name that the script has given.
    """
    name, host = str(dist.get_backend()), backend_serving(CPU)
    return str(dist.get_backend_config()) if ":" not in name and host not in ("", name) else None


def group_backend(device: torch.device) -> str:
    """Return the backend that serves ``device``: "gloo", "nccl", "threaded", "fake"."""
    return backend_serving(device) or str(dist.get_backend())


_stands_for: str | None = None


def stand_for(backend: str | None) -> None:
    """Let torch's fake process group stand for ``backend``: messages are issued as on it."""
    global _stands_for
    _stands_for = backend


def messages_as(backend: str) -> str:
    """Return the backend whose messages are issued for ``backend``: itself, or the backend that a
    fake group simulates.
    """
    return _stands_for or backend


def backend_serving(device: torch.device) -> str:
    """Return the backend of the process group for tensors on ``device``; "" if there is none."""
    for entry in str(dist.get_backend_config()).split(","):
        kind, _, name = entry.strip().rpartition(":")
        if kind in ("", device.type):
            return name
    return ""


def abort(group: dist.ProcessGroup | None, backend: str, device: torch.device) -> None:
    """Make all waits in ``group`` raise, on this rank and on its other ranks."""
    assert group is not None  # a dimension of one rank has none, and no waits
    if backend != "gloo":
        group._get_backend(device).abort()
        return
    gloo = group._get_backend(CPU)
    for peer in range(gloo.size()):
        if peer != gloo.rank():
            try:  # gloo closes connections only when a message on them has timed out
                work = gloo.recv([torch.empty(1)], peer, BREAK_TAG)  # type: ignore[attr-defined]
                work.wait(timedelta(milliseconds=1))
            except RuntimeError:
                pass  # the time-out is the purpose


def abort_together(aborts: Mapping[str, Callable[[], None]]) -> None:
    """Call ``aborts``, by name of communicator, concurrently; return when they have ended or after
    :data:`ABORT_SECONDS`. An exception of one is logged and does not stop the others.

    In sequence they might never end: NCCL frees memory in an abort, for which the driver waits
    until the device is idle, and a collective on a communicator that is still to be aborted never
    ends.
    """
    under_way = []
    for item in aborts.items():
        thread = threading.Thread(target=_try, args=item, name="hf_zero-abort", daemon=True)
        try:
            thread.start()
            under_way.append(thread)
        except RuntimeError:  # the interpreter is shutting down and starts no thread
            _try(*item)
    limit = time.monotonic() + ABORT_SECONDS
    for thread in under_way:
        thread.join(max(0.0, limit - time.monotonic()))


def _try(name: str, abort: Callable[[], None]) -> None:
    try:
        abort()
    except Exception:
        logger.exception("could not abort %s", name)


def destroy_group(group: object) -> None:
    """Destroy a process group of the current job; do nothing for None or a former job's group."""
    if group is not None and dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)
