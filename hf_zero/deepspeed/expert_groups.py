"""``deepspeed.utils.groups``: ranks that hold different experts, and those that hold the same.

DeepSpeed names a group by its size, ``ep_size_2``. A job has one size here; groups of size 1 are
each rank by itself, and all ranks as those that hold the same.
"""

from __future__ import annotations

from typing import Any

from hf_zero.distributed import process_group
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.errors import ConfigError
from hf_zero.parallel.expert.axis import AXIS, expert_axis

NAME = "ep_size_"


def create(expert_parallel_size_: int, mp_size: int | None = None, **_: Any) -> None:
    """Make the expert axis (collective over all ranks)."""
    expert_axis(expert_parallel_size_, "expert_parallel_size_")


def _size(group_name: str) -> int:
    """The size that ``group_name`` names; that of the job must be it. Raises ConfigError."""
    parallel, asked = get_parallel(), group_name.removeprefix(NAME)
    held = 1 if parallel is None else parallel.dims.expert
    if not asked.isdigit() or int(asked) not in (1, held):
        raise ConfigError(
            f"expert group {group_name!r} is not there: the experts of this job are spread over "
            f"{held} ranks; name {NAME}{held}"
        )
    return int(asked)


def get_expert_parallel_world_size(group_name: str) -> int:
    return _size(group_name)


def get_expert_parallel_rank(group_name: str) -> int:
    parallel = get_parallel()
    return 0 if _size(group_name) == 1 or parallel is None else parallel.coordinate(AXIS)


def get_expert_parallel_group(group_name: str) -> Any:
    """The torch process group; None where it is this rank alone."""
    parallel = get_parallel()
    return None if _size(group_name) == 1 or parallel is None else parallel.group(AXIS)


def get_expert_data_parallel_world_size(group_name: str) -> int:
    size, parallel = _size(group_name), get_parallel()
    if size == 1 or parallel is None:
        return process_group.get_world_size()
    return parallel.dims.size("expert_data")


def get_expert_data_parallel_rank(group_name: str) -> int:
    size, parallel = _size(group_name), get_parallel()
    if size == 1 or parallel is None:
        return process_group.get_rank()
    return parallel.coordinate("expert_data")


def get_max_expert_size() -> int:
    """Ranks that hold one set of the experts together."""
    parallel = get_parallel()
    return 1 if parallel is None else parallel.dims.expert


def get_max_expert_size_name() -> str:
    return f"{NAME}{get_max_expert_size()}"
