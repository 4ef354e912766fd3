"""``deepspeed.utils.groups``: all ranks share the state of ZeRO, or share layers
(tensor_parallel.py), or read parts of the same sequences (ulysses.py).
"""

from __future__ import annotations

from typing import Any

from hf_zero.deepspeed.placeholders import refuse
from hf_zero.distributed import process_group
from hf_zero.distributed.mpu import check_mpu
from hf_zero.parallel.expert.axis import expert_axis
from hf_zero.parallel.tensor.configured import readers


def get_data_parallel_rank() -> int:
    """As which of the ranks that read batches of their own this one reads."""
    return readers()[1]


def get_data_parallel_world_size() -> int:
    """Ranks that read batches of their own."""
    return readers()[0]


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Make the expert axis of ``ep_size`` ranks (collective); an ``mpu`` must split no model."""
    expert_axis(ep_size, "ep_size")
    if mpu is not None:
        check_mpu(mpu, process_group.get_world_size())


def get_data_parallel_group() -> Any:
    """The group of all ranks. Refused where ranks share layers, and the data-parallel ones are
    some of them.
    """
    if get_data_parallel_world_size() < process_group.get_world_size():
        refuse(
            "deepspeed.utils.groups.get_data_parallel_group() under tensor parallelism",
            "use the engine's own reductions",
        )
    return process_group.dist.group.WORLD


def get_data_parallel_group_ranks() -> list[int]:
    size = process_group.get_world_size() // get_data_parallel_world_size()
    return list(range(process_group.get_rank() % size, process_group.get_world_size(), size))


def one_rank() -> int:
    """The size of a parallelism that is not used."""
    return 1


def first_rank() -> int:
    """This rank in a parallelism that is not used."""
    return 0
