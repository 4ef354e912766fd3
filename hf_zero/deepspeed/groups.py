"""``deepspeed.utils.groups``: ranks that share the state of ZeRO, that share layers, that read
parts of the same sequences, and that hold the same or different experts.

DeepSpeed names a group of experts by its size, ``ep_size_2``. A job has one size here: a group of
size 1 is each rank by itself, and all ranks hold the same experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_zero.deepspeed.modules import refuse
from hf_zero.distributed import process_group
from hf_zero.distributed.parallel_dims import check_mpu
from hf_zero.distributed.parallel_groups import dims_in_effect, get_parallel, readers
from hf_zero.errors import ConfigError
from hf_zero.parallel.expert.marks import AXIS, expert_mesh_dim
from hf_zero.parallel.sequence.division import SEQUENCE_CONTEXT as SEQUENCE
from hf_zero.parallel.sequence.sequence_parallel import sequence_parallel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def get_data_parallel_rank() -> int:
    """Return the data-parallel rank of this process."""
    return readers()[1]


def get_data_parallel_world_size() -> int:
    """Return the number of ranks that read different batches."""
    return readers()[0]


def initialize(ep_size: int = 1, mpu: object = None) -> None:
    """Make the expert axis of ``ep_size`` ranks (collective); an ``mpu`` must split no model."""
    expert_mesh_dim(ep_size, "ep_size")
    if mpu is not None:
        check_mpu(mpu, process_group.get_world_size())


def get_data_parallel_group() -> ProcessGroup | None:
    """Return the group of all ranks. Raises NotBuiltError if ranks share layers or hold different
    ones, so that only some of them are data-parallel.
    """
    if get_data_parallel_world_size() < process_group.get_world_size():
        refuse(
            "deepspeed.utils.groups.get_data_parallel_group() under tensor or pipeline parallelism",
            "use the engine's own reductions",
        )
    return process_group.dist.group.WORLD


def get_data_parallel_group_ranks() -> list[int]:
    """Return the global ranks of the data-parallel ranks, by :func:`get_data_parallel_rank`."""
    return list(dims_in_effect().ranks_sharing(process_group.get_rank(), ("tensor",)))


def get_data_parallel_first_rank() -> int:
    """Return the global rank of the first data-parallel rank."""
    return get_data_parallel_group_ranks()[0]


def get_tensor_parallel_group() -> ProcessGroup | None:
    """Return the process group of the ranks that share this rank's layers, or None."""
    groups = get_parallel()
    return None if groups is None else groups.group("tensor")


def get_tensor_parallel_world_size() -> int:
    """Return the number of ranks that share a layer."""
    groups = get_parallel()
    return 1 if groups is None else groups.along("tensor").size


def get_tensor_parallel_rank() -> int:
    """Return this rank among those that share its layers."""
    groups = get_parallel()
    return 0 if groups is None else groups.along("tensor").rank


def get_tensor_parallel_first_rank() -> int:
    """Return the global rank of the first rank that shares this one's layers."""
    return process_group.get_rank() - get_tensor_parallel_rank()  # neighbors share layers


def get_sequence_parallel_group() -> object:
    """Return the process group of the ranks that read parts of the same sequences. Raises
    ConfigError if the job is not sequence parallel.
    """
    return sequence_parallel().group


def get_sequence_parallel_world_size() -> int:
    """Return the number of ranks that read parts of the same sequences."""
    groups = get_parallel()
    return 1 if groups is None else groups.along(SEQUENCE).size


def get_sequence_parallel_rank() -> int:
    """Return this rank among those that read parts of its sequences."""
    groups = get_parallel()
    return 0 if groups is None else groups.along(SEQUENCE).rank


NAME = "ep_size_"


def create(expert_parallel_size_: int, use_data_before_expert_parallel_: bool = False) -> None:
    """Make the expert axis (collective over all ranks). Raises NotBuiltError for ranks of an axis
    that are not neighbors.
    """
    if use_data_before_expert_parallel_:
        refuse("use_data_before_expert_parallel_=True", "leave it out: neighbors share experts")
    expert_mesh_dim(expert_parallel_size_, "expert_parallel_size_")


def _size(group_name: str) -> int:
    """Return the size in ``group_name``, which must be 1 or the job's. Raises ConfigError."""
    size = get_max_expert_size()
    sizes = {f"{NAME}{size}": size, f"{NAME}1": 1}
    if group_name not in sizes:
        raise ConfigError(
            f"there is no expert group {group_name!r}: the experts of this job are spread over "
            f"{size} ranks; name {NAME}{size}"
        )
    return sizes[group_name]


def get_expert_parallel_world_size(group_name: str) -> int:
    return _size(group_name)


def get_expert_parallel_rank(group_name: str) -> int:
    parallel = get_parallel()
    return 0 if _size(group_name) == 1 or parallel is None else parallel.coordinate(AXIS)


def get_expert_parallel_group(group_name: str) -> ProcessGroup | None:
    """Return the torch process group; None if it is this rank alone."""
    parallel = get_parallel()
    return None if _size(group_name) == 1 or parallel is None else parallel.group(AXIS)


def get_expert_data_parallel_world_size(group_name: str) -> int:
    if _size(group_name) == 1:
        return get_data_parallel_world_size()
    return dims_in_effect().size("expert_data")


def get_expert_data_parallel_rank(group_name: str) -> int:
    if _size(group_name) == 1:
        return get_data_parallel_rank()
    return dims_in_effect().coordinate(process_group.get_rank(), "expert_data")


def get_max_expert_size() -> int:
    """Return the number of ranks that together hold one set of the experts."""
    parallel = get_parallel()
    return 1 if parallel is None else parallel.dims.expert


def get_max_expert_size_name() -> str:
    return f"{NAME}{get_max_expert_size()}"
