"""Backends of torch.distributed, by device.

| function | answer |
| --- | --- |
| :func:`native_backend` | torch's backend for a kind of device, without a group |
| :func:`backend_string` | a name for ``init_process_group``, for a device and host memory |
| :func:`requested_backend_string` | the same, if a script names a backend |
| :func:`serving_backend` | the default group's backend for tensors on a device; "" without one |
| :func:`group_backend` | the same; without one, the backend by which the group is called |
| :func:`subgroup_backend_string` | a name for ``new_group`` |
| :func:`issued_as` | the backend as which messages are issued, also in a simulation |
"""

from __future__ import annotations

import os
import resource
from datetime import timedelta

import torch
import torch.distributed as dist

from hf_zero.config.variables import local_world_size
from hf_zero.device import kinds
from hf_zero.distributed.process_group import CPU, default_store, get_rank, get_world_size
from hf_zero.distributed.rank_hosts import choose_interface
from hf_zero.errors import ConfigError
from hf_zero.logging import log_rank0

STORELESS = ("threaded", "fake")  # backends whose ranks are threads, or simulated
FILES_A_RANK = 16  # connections to each rank in groups of all; on the store's host, its clients
OTHER_FILES = 512


def native_backend(device: torch.device | str) -> str:
    """Return torch.distributed's backend for this kind of device: "gloo" for host memory."""
    return "gloo" if kinds.is_synchronous(device) else dist.get_default_backend_for_device(device)


def backend_string(device: torch.device) -> str:
    """Return the backend string of a process group: the backend of ``device``, and gloo for tensors
    in host memory.
    """
    if kinds.is_synchronous(device):
        return "gloo"
    return f"cpu:gloo,{device.type}:{native_backend(device)}"


def requested_backend_string(backend: str | None, device: torch.device) -> str:
    """Return the backend string of a process group for ``device`` if ``backend`` was asked for. The
    device's backend alone, as Accelerate and scripts write "nccl", would leave out host memory, so
    gloo is added.
    """
    is_default = backend is None or backend.lower() == native_backend(device)
    return backend_string(device) if is_default else str(backend)


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


def serving_backend(device: torch.device) -> str:
    """Return the backend of the process group for tensors on ``device``; "" if there is none."""
    for entry in str(dist.get_backend_config()).split(","):
        kind, _, name = entry.strip().rpartition(":")
        if kind in ("", device.type):
            return name
    return ""


def group_backend(device: torch.device) -> str:
    """Return the backend of the process group for tensors on ``device``: "gloo", "nccl",
    "threaded", "fake"; without one, the backend by which the group is called.
    """
    return serving_backend(device) or str(dist.get_backend())


def subgroup_backend_string() -> str | None:
    """Return the backend string for groups of some ranks, so that they serve what the default group
    serves; None if torch derives the same from the name that the script has given.
    """
    name, host = str(dist.get_backend()), serving_backend(CPU)
    return str(dist.get_backend_config()) if ":" not in name and host not in ("", name) else None


def add_host_backend(timeout: timedelta) -> dist.ProcessGroupGloo | None:
    """Add gloo for host memory to the default group if a script has made it for the device alone
    (collective). Return it; None if the group serves host memory, or gloo is not built.
    """
    if serving_backend(CPU) or not dist.is_gloo_available():
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


def raise_file_limit(world: int) -> None:
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


_simulated: str | None = None


def simulate_backend(backend: str | None) -> None:
    """Issue messages of torch's fake process group as ``backend`` would."""
    global _simulated
    _simulated = backend


def issued_as(backend: str) -> str:
    """Return the backend whose messages are issued for ``backend``: itself, or the backend that a
    fake group simulates.
    """
    return _simulated or backend
