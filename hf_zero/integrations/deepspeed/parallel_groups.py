"""``deepspeed.utils.groups``: all ranks are data parallel; of model and sequence parallelism there
is one rank.
"""

from __future__ import annotations

from typing import Any

from hf_zero.distributed import process_group
from hf_zero.distributed.mpu import check_mpu
from hf_zero.integrations.deepspeed.placeholders import refuse

get_data_parallel_rank = process_group.get_rank
get_data_parallel_world_size = process_group.get_world_size


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Accepted for one rank of expert parallelism, and for an ``mpu`` that splits no model."""
    if ep_size != 1:
        refuse(f"deepspeed.utils.groups.initialize(ep_size={ep_size})", "leave ep_size at 1")
    if mpu is not None:
        check_mpu(mpu, process_group.get_world_size())


def get_data_parallel_group() -> Any:
    """The group of all ranks."""
    return process_group.dist.group.WORLD


def get_data_parallel_group_ranks() -> list[int]:
    return list(range(process_group.get_world_size()))


def one_rank() -> int:
    """The size of a parallelism that is not used."""
    return 1


def first_rank() -> int:
    """This rank in a parallelism that is not used."""
    return 0


def own_rank() -> int:
    """The first rank of this rank's group in a parallelism that is not used: itself."""
    return process_group.get_rank()
