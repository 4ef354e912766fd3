"""``deepspeed.comm``: hf_zero's process groups, and torch.distributed for every name that is not
here.
"""

from datetime import timedelta
from typing import Any

from hf_zero.distributed import comm as _comm
from hf_zero.distributed.comm import (
    barrier,
    destroy_process_group,
    get_local_rank,
    get_rank,
    get_world_size,
    is_initialized,
)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: float | timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """``hf_zero.distributed.comm.init_distributed`` with DeepSpeed's arguments; ranks are found in
    the launcher's variables, without mpi4py.
    """
    if dist_init_required is not False:
        _comm.init_distributed(
            dist_backend, timeout, init_method, rank, world_size, distributed_port
        )


def __getattr__(name: str) -> Any:
    return getattr(_comm.dist, name)


__all__ = [
    "barrier",
    "destroy_process_group",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_distributed",
    "is_initialized",
]
