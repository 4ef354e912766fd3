"""``deepspeed.comm``: torch.distributed's collectives under DeepSpeed's names and arguments, the
process group that hf-zero joins, and the switches of the log of collectives
(``hf_zero/measures/comms_log.py``).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING

import torch

from hf_zero.config import ZeroConfig
from hf_zero.config.measures import CommsLoggerSection
from hf_zero.config.value_types import BOOLEAN, NAMES, argument
from hf_zero.config.variables import positive_number
from hf_zero.device import kinds
from hf_zero.distributed import init, process_group, world_group
from hf_zero.distributed.rendezvous import announce
from hf_zero.errors import ConfigError, LaunchError
from hf_zero.logging import log_rank0
from hf_zero.measures.comms_log import comms_logger

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup, Work

dist = process_group.dist
DEFAULT_PORT = 29500
default_pg_timeout = timedelta(minutes=positive_number("DEEPSPEED_TIMEOUT") or 30)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: float | timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Call ``hf_zero.distributed.init.init_distributed`` with DeepSpeed's arguments; ranks are read
    from the launcher's variables, without mpi4py. The default timeout is DEEPSPEED_TIMEOUT, in
    minutes. On the CPU a GPU-only backend, such as "nccl" in scripts, is replaced by gloo, with a
    warning. Raises ConfigError if ``dist_init_required`` is False and there is no group.
    """
    if timeout is None and os.environ.get("DEEPSPEED_TIMEOUT"):
        timeout = default_pg_timeout
    if dist_init_required is False and not process_group.is_initialized():
        raise ConfigError(
            "dist_init_required=False but no process group exists; start one first, or drop the "
            "argument"
        )
    if dist_backend is not None and kinds.is_synchronous(process_group.default_device()):
        runs_on = dist.Backend.backend_capability.get(str(dist_backend).lower(), ["cpu"])
        if "cpu" not in runs_on:
            log_rank0(
                f"dist_backend={dist_backend!r} is for {', '.join(runs_on)}: ranks on the CPU "
                "communicate by gloo",
                logging.WARNING,
            )
            dist_backend = None
    if dist_init_required is not False:
        init.init_distributed(
            dist_backend, timeout, init_method, rank, world_size, distributed_port
        )


def _collective(name: str, **renamed: str) -> Callable[..., object]:
    """Wrap torch.distributed's function ``name`` with DeepSpeed's further arguments: ``prof`` and
    ``log_name``, which control its log entry, and ``debug``. ``renamed``: arguments by torch's
    names.
    """
    function = getattr(dist, name)

    @wraps(function)
    def call(
        *args: object,
        prof: bool = False,
        log_name: str = "",
        debug: object = None,
        **kwargs: object,
    ) -> object:
        kwargs = {renamed.get(key, key): value for key, value in kwargs.items()}
        if not comms_logger.wants(log_name or name, prof):
            return function(*args, **kwargs)
        return comms_logger.timed(name, log_name or name, function, args, kwargs)

    call.__name__ = call.__qualname__ = name
    call.__module__ = __name__
    return call


def _first_of(*names: str) -> str:
    """Return the first of ``names`` that this torch has: some were renamed."""
    return next(name for name in names if hasattr(dist, name))


all_gather = _collective("all_gather")
all_gather_into_tensor = _collective(
    _first_of("all_gather_single", "all_gather_into_tensor"), tensor="input_tensor"
)
all_gather_object = _collective("all_gather_object")
all_reduce = _collective("all_reduce")
all_to_all = _collective("all_to_all")
all_to_all_single = _collective("all_to_all_single", tensor="input")
batch_isend_irecv = _collective("batch_isend_irecv")
broadcast = _collective("broadcast")
broadcast_object_list = _collective("broadcast_object_list")
gather = _collective("gather")
irecv = _collective("irecv")
isend = _collective("isend")
monitored_barrier = _collective("monitored_barrier")
recv = _collective("recv")
reduce = _collective("reduce")
reduce_scatter = _collective("reduce_scatter")
reduce_scatter_tensor = _collective(
    _first_of("reduce_scatter_single", "reduce_scatter_tensor"),
    output_tensor="output",
    tensor="input",
)
scatter = _collective("scatter")
send = _collective("send")
allgather_fn = all_gather_into_tensor
reduce_scatter_fn = reduce_scatter_tensor


def inference_all_reduce(
    tensor: torch.Tensor,
    op: object = dist.ReduceOp.SUM,
    group: ProcessGroup | None = None,
    **options: object,
) -> object:
    """Run :func:`all_reduce`; DeepSpeed has its own kernels for it in inference."""
    return all_reduce(tensor, op=op, group=group, **options)


def barrier(
    group: ProcessGroup | None = None,
    async_op: bool = False,
    device_ids: object = None,
    prof: bool = False,
    log_name: str = "barrier",
    debug: object = None,
) -> Work | None:
    """Return when all ranks have arrived; over all ranks, errors name those that are missing."""
    if group is None and not async_op:
        world_group.barrier()
        return None
    return dist.barrier(group, async_op=async_op)


def mpi_discovery(distributed_port: int = DEFAULT_PORT, verbose: bool = True) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the variables of mpirun or
    srun. Raises LaunchError if no launcher has set any.
    """
    rendezvous = announce(port=distributed_port)
    if rendezvous is None:
        raise LaunchError(
            "mpi_discovery: neither mpirun nor srun has started this process; start it with one of "
            "them, or with hf-zero launch"
        )
    if verbose:
        log_rank0(f"found by the variables of the launcher: {rendezvous}")


def get_world_group() -> ProcessGroup | None:
    """Return the group of all ranks."""
    return dist.group.WORLD


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    """Make a torch DeviceMesh over all ranks (collective)."""
    kind = process_group.default_device().type
    return dist.init_device_mesh(kind, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def has_all_gather_into_tensor() -> bool:
    return True


def configure(
    deepspeed_config: object = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Switch the log on or off: according to ``comms_logger`` of a configuration, for all
    operations, or for those named in ``prof_ops`` and calls with ``prof=True``. Raises ConfigError
    for values that the section does not have.
    """
    if deepspeed_config is not None:
        config = getattr(deepspeed_config, "zero_config_native", deepspeed_config)
        settings = ZeroConfig.coerce(config, foreign=True)
        comms_logger.take(settings.section_of(CommsLoggerSection))
    switches = {"enabled": enabled, "prof_all": prof_all, "verbose": verbose, "debug": debug}
    for name, value in switches.items():
        if value is not None:
            setattr(comms_logger, name, argument("configure", name, BOOLEAN, value))
    if prof_ops is not None:
        comms_logger.prof_ops = list(argument("configure", "prof_ops", NAMES, prof_ops))


def log_summary(
    show_straggler: bool = False, return_dict: bool = False
) -> dict[str, object] | None:
    """Run :meth:`CommsLogger.log_all`, printing on rank 0; collective with ``show_straggler``."""
    return comms_logger.log_all(process_group.get_rank() == 0, show_straggler, return_dict)
