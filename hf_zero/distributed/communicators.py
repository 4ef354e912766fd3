"""The communicators of some ranks on their device: made by splits of the job's own where NCCL can
split it, with the fields of NCCL's configuration that the user has set.

[Note: one bootstrap]
A new communicator of NCCL begins with an id that one rank writes to the store and its other ranks
read. A split takes the connections of the job's communicator instead, and one call makes the
communicators of all sets of ranks. It needs a default group that is bound to its device, whose
communicator is made with the group. ``new_group`` splits there, too, but once for each set, with
all ranks of the job.

torch's ``split_group`` divides all backends of a group unless it takes the name of one, as it does
since torch 2.13. Before, a job with gloo beside NCCL would connect gloo anew for each set; its
default group is therefore not bound, and each set has its own id.

[Note: ranks of the parent]
A split reads the global ranks of its parent from the options of the parent's backend. Those of a
default group are empty, which torch 2.11 to 2.13 takes for all ranks only if the group is the first
of its backend in the process; after another one the process crashes (pytorch/pytorch#192109). So
they are written there first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from hf_zero.device import kinds
from hf_zero.distributed.backends import serving_backend
from hf_zero.distributed.process_group import CPU
from hf_zero.errors import ConfigError

NCCL = "nccl"
POLICY = "cta_policy"


def device_to_bind(backends: str, device: torch.device) -> torch.device | None:
    """Return ``device`` if a default group with ``backends`` is bound to it: one whose communicator
    can be split; None otherwise.
    """
    on_device = f"{device.type}:{NCCL}" in backends.split(",")
    return device if on_device and device.index is not None and _selects_backends() else None


def make_group(
    sets: Sequence[Sequence[int]],
    rank: int,
    device: torch.device,
    backend: str,
    limit: timedelta,
    options: dist.ProcessGroupNCCL.Options | None,
) -> dist.ProcessGroup | None:
    """Return the process group of the set in ``sets`` that contains ``rank``, this rank, for
    tensors on ``device``; None if no set does. Collective over all ranks of the job, with the same
    sets, of which no two share a rank. ``options``: the options of ``backend``.
    """
    lists = [list(ranks) for ranks in sets]
    if _splits(device, backend) and name_ranks(device):
        split: Callable[..., dist.ProcessGroup | None] = dist.split_group
        if _selects_backends():
            split = partial(split, backend=f"{device.type}:{backend}")
        return split(split_ranks=lists, timeout=limit, pg_options=options)
    # Only the device's backend; the job's group may have others.
    name, mine = None if kinds.is_synchronous(device) else backend, None
    for ranks in lists:
        group = dist.new_group(ranks, timeout=limit, backend=name, pg_options=options)
        mine = group if rank in ranks else mine
    return mine


def _splits(device: torch.device, backend: str) -> bool:
    """Return whether the default group can be split into groups for ``device`` alone."""
    group = dist.group.WORLD
    return (
        backend == NCCL
        and group is not None
        and group.bound_device_id is not None
        and (_selects_backends() or not serving_backend(CPU))
    )


def name_ranks(device: torch.device) -> bool:
    """Write the ranks of the default group into the options of its backend for ``device``; return
    whether it can be split: not if torch has wrapped it to debug it.
    """
    group = dist.group.WORLD
    assert group is not None
    ranks, backend = list(range(group.size())), group._get_backend(device)
    if not backend.supports_splitting:
        return False
    backend.options.global_ranks_in_group = ranks
    return bool(backend.options.global_ranks_in_group == ranks)


def _selects_backends() -> bool:
    return "backend" in inspect.signature(dist.split_group).parameters


def nccl_options(
    fields: Mapping[str, int | str], high_priority: bool, limit: timedelta
) -> dist.ProcessGroupNCCL.Options:
    """Return the options of a communicator of NCCL, whose streams have high priority or not, with
    ``fields`` of NCCL's configuration, by the names of the section ``nccl``.

    Raises ConfigError for a field that the NCCL of this build of torch does not have.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high_priority)
    options._timeout = limit
    for name, value in fields.items():
        if not hasattr(options.config, name):
            raise ConfigError(
                f"nccl.{name}: this build of torch {torch.__version__} has an NCCL without "
                f"{name}; remove the key, or use a build with NCCL 2.27 or newer, as the CUDA "
                "wheels of torch 2.11 are"
            )
        if name == POLICY:
            value = getattr(dist.ProcessGroupNCCL, f"NCCL_CTA_POLICY_{str(value).upper()}")
        setattr(options.config, name, value)
    return options
