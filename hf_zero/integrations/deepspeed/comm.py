"""``deepspeed.comm.init_distributed``."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from hf_zero.distributed import init


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
    """``hf_zero.distributed.init.init_distributed`` with DeepSpeed's arguments; ranks are found in
    the launcher's variables, without mpi4py.
    """
    if dist_init_required is not False:
        init.init_distributed(
            dist_backend, timeout, init_method, rank, world_size, distributed_port
        )
