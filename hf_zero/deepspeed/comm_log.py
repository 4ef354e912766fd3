"""The log of ``deepspeed.comm``'s collectives: their number, bytes and times.

It covers the script's own calls. The engine's gathers and reductions are spans of a profile
(``hf_zero/device/spans.py``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hf_zero.config import ZeroConfig
from hf_zero.deepspeed.timers import trim_mean
from hf_zero.device import kinds
from hf_zero.distributed import process_group, world_group
from hf_zero.logging import logger

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
