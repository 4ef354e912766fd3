"""The expert axis of a job: the data-parallel ranks that hold different experts."""

from __future__ import annotations

from dataclasses import replace

from hf_zero.distributed import init, process_group
from hf_zero.distributed.collectives import MeshDim
from hf_zero.distributed.parallel_dims import ParallelDims, check_size
from hf_zero.distributed.parallel_groups import get_parallel, init_parallel
from hf_zero.errors import ConfigError

AXIS = "expert"


def expert_axis(size: int, asked: str) -> MeshDim | None:
    """Return the mesh dimension of ``size`` expert-parallel ranks, or None for one rank. The first
    call creates it (collective over all ranks of the job). Arguments and errors:
    :func:`expert_dims`.
    """
    dims = expert_dims(size, asked)
    return None if dims is None else init_parallel(dims).along(AXIS)


def expert_dims(size: int, asked: str) -> ParallelDims | None:
    """Return the job's mesh dimensions with experts spread over ``size`` ranks, or None for one
    rank. ``asked``: the setting that requests the size, for error messages.

    Raises ConfigError for an invalid size, a size that does not divide the ranks that read
    different tokens, and a second size in a job.
    """
    check_size(size, asked)
    if size == 1:
        return None
    init.init_distributed()
    held = get_parallel()
    dims = ParallelDims(process_group.get_world_size()) if held is None else held.dims
    if dims.expert not in (1, size):
        raise ConfigError(
            f"{asked} = {size} was asked for in a job whose experts are spread over {dims.expert} "
            "ranks; the size stays for the life of the processes, after engine.destroy() too: "
            "start new ones for another"
        )
    if dims.batches % size:
        raise ConfigError(
            f"{asked} = {size} does not divide the {dims.batches} ranks that read different "
            "tokens; choose a divisor of it"
        )
    return replace(dims, expert=size)
