"""``deepspeed.comm``: torch.distributed's collectives under DeepSpeed's names and arguments, the
process group that hf-zero joins, and the log of the script's own collectives: their number, bytes
and times. The engine's gathers and reductions are spans of a profile (``device/spans.py``).
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

import torch

from hf_zero.config import ZeroConfig
from hf_zero.deepspeed.logs import trim_mean
from hf_zero.device import kinds
from hf_zero.distributed import init, process_group, world_group
from hf_zero.distributed.rendezvous import announce
from hf_zero.errors import ConfigError, LaunchError
from hf_zero.logging import log_rank0, logger

dist = process_group.dist
DEFAULT_PORT = 29500
default_pg_timeout = timedelta(minutes=float(os.environ.get("DEEPSPEED_TIMEOUT") or 30))


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
    if dist_backend is not None and kinds.is_host(process_group.default_device()):
        runs_on = dist.Backend.backend_capability.get(dist_backend.lower(), ["cpu"])
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


def _collective(name: str, **renamed: str) -> Callable[..., Any]:
    """Wrap torch.distributed's function ``name`` with DeepSpeed's further arguments: ``prof`` and
    ``log_name``, which control its log entry, and ``debug``. ``renamed``: arguments by torch's
    names.
    """
    function = getattr(dist, name)

    @wraps(function)
    def call(
        *args: Any, prof: bool = False, log_name: str = "", debug: Any = None, **kwargs: Any
    ) -> Any:
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
all_gather_into_tensor = _collective(_first_of("all_gather_single", "all_gather_into_tensor"))
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
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **options: Any
) -> Any:
    """Run :func:`all_reduce`; DeepSpeed has its own kernels for it in inference."""
    return all_reduce(tensor, op=op, group=group, **options)


def barrier(
    group: Any = None,
    async_op: bool = False,
    device_ids: Any = None,
    prof: bool = False,
    log_name: str = "barrier",
    debug: Any = None,
) -> Any:
    """Return when all ranks have arrived; over all ranks, errors name those that are missing."""
    if group is None and not async_op:
        world_group.barrier()
        return None
    return dist.barrier(group, async_op=async_op)


def mpi_discovery(distributed_port: int = DEFAULT_PORT, verbose: bool = True) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the variables of mpirun or
    srun. Raises LaunchError if no launcher has set any.
    """
    found = announce(port=distributed_port)
    if found is None:
        raise LaunchError(
            "mpi_discovery: neither mpirun nor srun has started this process; start it with one of "
            "them, or with hf-zero launch"
        )
    if verbose:
        log_rank0(f"found by the variables of the launcher: {found}")


def get_world_group() -> Any:
    """Return the group of all ranks."""
    return dist.group.WORLD


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """Make a torch DeviceMesh over all ranks (collective)."""
    kind = process_group.default_device().type
    return dist.init_device_mesh(kind, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def has_all_gather_into_tensor() -> bool:
    return True


# ---- The log of the script's collectives ----

TRIMMED = 0.1  # fraction of the smallest and of the largest times left out of means


class CommsLogger:
    """``comms_dict``: for each operation and number of bytes (of its largest argument) the number
    of calls, and for each call its milliseconds, Gbit/s and Gbit/s on the busiest link.
    """

    def __init__(self) -> None:
        self.comms_dict: dict[str, dict[int, list[Any]]] = {}
        self.enabled = False
        self.prof_all = True
        self.prof_ops: list[str] = []
        self.verbose = False
        self.debug = False

    def take(self, config: ZeroConfig) -> None:
        """Apply the section ``comms_logger`` of ``config``, if it enables the log."""
        section = config.comms_logger
        if section.enabled:
            self.enabled, self.prof_all = True, section.prof_all
            self.prof_ops = list(section.prof_ops)
            self.verbose, self.debug = section.verbose, bool(section.debug)

    def start_profiling_comms(self) -> None:
        """Log all operations."""
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        """Log only the operations in ``prof_ops``, and calls with ``prof=True``."""
        self.prof_all = False

    def start_profiling_op(self, op_name_list: Sequence[str]) -> None:
        self.prof_ops = list(dict.fromkeys([*self.prof_ops, *op_name_list]))

    def stop_profiling_op(self, op_name_list: Sequence[str]) -> None:
        self.prof_ops = [name for name in self.prof_ops if name not in op_name_list]

    def wants(self, name: str, prof: bool) -> bool:
        """Whether a call of the operation ``name`` is logged."""
        return self.enabled and (self.prof_all or prof or name in self.prof_ops)

    def timed(
        self,
        operation: str,
        name: str,
        function: Callable[..., Any],
        args: Any,
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call ``function`` and log it as ``name``; waits for the device before and after."""
        device = process_group.default_device()
        kinds.synchronize(device)
        begin = time.perf_counter()
        answer = function(*args, **kwargs)
        if hasattr(answer, "wait"):
            answer.wait()
        kinds.synchronize(device)
        took = (time.perf_counter() - begin) * 1e3
        size = max(map(_bytes, (*args, *kwargs.values())), default=0)
        self.append(operation, name, took, size)
        return answer

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        """Log a call of ``raw_name`` on ``msg_size`` bytes that took ``latency`` milliseconds."""
        rates = bandwidths(raw_name, msg_size, latency, process_group.get_world_size())
        sizes = self.comms_dict.setdefault(record_name, {})
        record = sizes.setdefault(msg_size, [0, [], [], []])
        record[0] += 1
        for column, value in zip(record[1:], (latency, *rates)):
            column.append(value)
        if self.verbose and process_group.get_rank() == 0:
            logger.info(
                "comm op: %s | time (ms): %.2f | msg size: %s | algbw (Gbps): %.2f | busbw (Gbps): "
                "%.2f",
                record_name,
                latency,
                convert_size(msg_size),
                *rates,
            )

    def get_raw_data(self) -> dict[str, dict[int, list[Any]]]:
        return dict(self.comms_dict)

    def reset_data(self) -> None:
        self.comms_dict.clear()

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]] | None:
        """Return by bytes: count, total and mean time, mean rates; None if it was not called."""
        sizes = self.comms_dict.get(operation_name)
        if sizes is None:
            return None
        return {size: _summary(size, record) for size, record in sorted(sizes.items())}

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Print the log. ``return_dict``: return it. ``show_straggler`` (collective, after the same
        calls on all ranks): include the time of each call on the fastest rank, and the additional
        time on this one.
        """
        summary = {name: self.get_operation_summary(name) or {} for name in self.comms_dict}
        stragglers = self._stragglers() if show_straggler else None
        if print_log:
            for line in (*_lines(summary), *_lines(stragglers or {})):
                print(line)
        if not return_dict:
            return None
        where = {"world_size": process_group.get_world_size(), "rank": process_group.get_rank()}
        return {
            "summary": summary,
            "straggler_analysis": stragglers,
            "metadata": {**where, "timestamp": time.strftime("%Y-%m-%dT%H:%M:%S")},
        }

    def _stragglers(self) -> dict[str, dict[int, dict[str, Any]]]:
        times = {
            name: {size: record[1] for size, record in sorted(sizes.items())}
            for name, sizes in self.comms_dict.items()
        }
        every = [times]
        if process_group.is_initialized():
            every = world_group.get_world_group().all_gather_object(times, "the log of collectives")
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for name, sizes in times.items():
            for size, own in sizes.items():
                ranks = [each.get(name, {}).get(size, own) for each in every]
                fastest = [min(call) for call in zip(*ranks)]
                late = [mine - least for mine, least in zip(own, fastest)]
                found.setdefault(name, {})[size] = {
                    "count": len(fastest),
                    "total_comm_lat_ms": sum(fastest),
                    "total_straggler_ms": sum(late),
                    "avg_comm_lat_ms": trim_mean(fastest, TRIMMED),
                    "avg_straggler_ms": trim_mean(late, TRIMMED),
                    "msg_size_bytes": size,
                    "msg_size_str": convert_size(size),
                }
        return found


comms_logger = CommsLogger()


def convert_size(size_bytes: int) -> str:
    """Return bytes as text: ``"1.5 KB"`` for 1536."""
    if size_bytes == 0:
        return "0B"
    power = int(math.log(size_bytes, 1024))
    unit = ("B", "KB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB")[power]
    return f"{round(size_bytes / 1024**power, 2)} {unit}"


def bandwidths(operation: str, size: int, milliseconds: float, ranks: int) -> tuple[float, float]:
    """Return the Gbit/s of ``size`` bytes, as seen by the script and on the busiest link."""
    rate = size * 8e-6 / milliseconds if milliseconds else 0.0
    if "all_reduce" in operation:
        return 2 * rate, 2 * rate * (ranks - 1) / ranks
    if operation.startswith(("all_to_all", "all_gather", "reduce_scatter")):
        return rate, rate * (ranks - 1) / ranks
    return rate, rate


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


def _summary(size: int, record: Sequence[Any]) -> dict[str, Any]:
    count, times, rates, links = record
    return {
        "count": count,
        "total_latency_ms": sum(times),
        "avg_latency_ms": trim_mean(times, TRIMMED),
        "tput_avg_gbps": trim_mean(rates, TRIMMED),
        "busbw_avg_gbps": trim_mean(links, TRIMMED),
        "msg_size_bytes": size,
        "msg_size_str": convert_size(size),
    }


def _lines(rows: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> list[str]:
    return [
        f"{name}: {row['msg_size_str']} x {row['count']}, "
        + ", ".join(f"{key} {value:.3f}" for key, value in row.items() if isinstance(value, float))
        for name, sizes in rows.items()
        for row in sizes.values()
    ]


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Switch the log on or off: according to ``comms_logger`` of a configuration, for all
    operations, or for those named in ``prof_ops`` and calls with ``prof=True``.
    """
    if deepspeed_config is not None:
        config = getattr(deepspeed_config, "zero_config_native", deepspeed_config)
        comms_logger.take(ZeroConfig.coerce(config, foreign=True))
    for name, value in (
        ("enabled", enabled),
        ("prof_all", prof_all),
        ("prof_ops", None if prof_ops is None else list(prof_ops)),
        ("verbose", verbose),
        ("debug", debug),
    ):
        if value is not None:
            setattr(comms_logger, name, value)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Run :meth:`CommsLogger.log_all`, printing on rank 0; collective with ``show_straggler``."""
    return comms_logger.log_all(process_group.get_rank() == 0, show_straggler, return_dict)
