"""``comms_logger``: the log of collectives. The script's own (``deepspeed.comm``) are timed one by
one; those of engines are counted by operation, unit and group, with the time that computation
waited for them, and not serialized (``collectives.py``).
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hf_zero.config.measures import CommsLoggerSection
from hf_zero.device import kinds
from hf_zero.distributed import process_group, world_group
from hf_zero.errors import ConfigError
from hf_zero.logging import JsonObject, aligned, in_units, logger
from hf_zero.measures.collectives import EngineCollectives

# figures of a summary, and their names in its table
COLUMNS = {
    "total_latency_ms": "total (ms)",
    "avg_latency_ms": "mean (ms)",
    "tput_avg_gbps": "throughput (Gbit/s)",
    "busbw_avg_gbps": "bus bandwidth (Gbit/s)",
    "total_comm_lat_ms": "total on the fastest rank (ms)",
    "avg_comm_lat_ms": "mean (ms)",
    "total_straggler_ms": "additional on this rank (ms)",
    "avg_straggler_ms": "mean (ms)",
}
TRIMMED = 0.1  # fraction of the smallest and of the largest times left out of means


class CommsLogger:
    """``comms_dict``: for each operation and number of bytes (of its largest argument) the number
    of calls, and for each call its milliseconds, Gbit/s and Gbit/s on the busiest link.
    ``engines``: the counts of the collectives of live engines.
    """

    def __init__(self) -> None:
        self.comms_dict: dict[str, dict[int, list[Any]]] = {}
        self.engines: weakref.WeakSet[EngineCollectives] = weakref.WeakSet()
        self.enabled = False
        self.prof_all = True
        self.prof_ops: list[str] = []
        self.verbose = False
        self.debug = False

    def take(self, section: CommsLoggerSection) -> None:
        """Apply ``section`` if it enables the log."""
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
        """Return whether a call of the operation ``name`` is logged."""
        return self.enabled and (self.prof_all or prof or name in self.prof_ops)

    def timed(
        self,
        operation: str,
        name: str,
        function: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> object:
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
                in_units(msg_size),
                *rates,
            )

    def get_raw_data(self) -> dict[str, dict[int, list[object]]]:
        return dict(self.comms_dict)

    def reset_data(self) -> None:
        self.comms_dict.clear()

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, object]] | None:
        """Return by bytes: count, total and mean time, mean rates; None if it was not called."""
        sizes = self.comms_dict.get(operation_name)
        if sizes is None:
            return None
        return {size: _summary(size, record) for size, record in sorted(sizes.items())}

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> JsonObject | None:
        """Print the log. ``return_dict``: return it. ``show_straggler`` (collective, after the same
        calls on all ranks): include the time of each call on the fastest rank, and the additional
        time on this one.
        """
        summary = {name: self.get_operation_summary(name) or {} for name in self.comms_dict}
        stragglers = self._stragglers() if show_straggler else None
        if print_log:
            engines = [engine for engine in self.engines if engine.rows]
            tables = [_lines(summary), _lines(stragglers or {}), *map(engine_lines, engines)]
            for table in filter(None, tables):
                print("\n".join(table))
        if not return_dict:
            return None
        where = {"world_size": process_group.get_world_size(), "rank": process_group.get_rank()}
        return {
            "summary": summary,
            "straggler_analysis": stragglers,
            "engines": [[row.as_dict() for row in engine.rows.values()] for engine in self.engines],
            "metadata": {**where, "timestamp": time.strftime("%Y-%m-%dT%H:%M:%S")},
        }

    def _stragglers(self) -> dict[str, dict[int, dict[str, object]]]:
        times = {
            name: {size: record[1] for size, record in sorted(sizes.items())}
            for name, sizes in self.comms_dict.items()
        }
        times_of_ranks = [times]
        if process_group.is_initialized():
            world = world_group.get_world_group()
            times_of_ranks = world.all_gather_object(times, "the log of collectives")
        stragglers: dict[str, dict[int, dict[str, object]]] = {}
        for name, sizes in times.items():
            for size, latencies in sizes.items():
                by_rank = [of_rank.get(name, {}).get(size, latencies) for of_rank in times_of_ranks]
                fastest = [min(call) for call in zip(*by_rank)]
                late = [latency - least for latency, least in zip(latencies, fastest)]
                stragglers.setdefault(name, {})[size] = {
                    "count": len(fastest),
                    "total_comm_lat_ms": sum(fastest),
                    "total_straggler_ms": sum(late),
                    "avg_comm_lat_ms": trim_mean(fastest, TRIMMED),
                    "avg_straggler_ms": trim_mean(late, TRIMMED),
                    "msg_size_bytes": size,
                    "msg_size_str": convert_size(size),
                }
        return stragglers


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


def _bytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


def _summary(size: int, record: Sequence[Any]) -> dict[str, object]:
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


def _lines(rows: Mapping[str, Mapping[int, JsonObject]]) -> list[str]:
    """Return the table of a summary: a line for each operation and size."""
    pairs = [(name, row) for name, sizes in rows.items() for row in sizes.values()]
    if not pairs:
        return []
    figures = [key for key in COLUMNS if key in pairs[0][1]]
    return aligned(
        [
            ("operation", "size", "calls", *(COLUMNS[key] for key in figures)),
            *(
                (
                    name,
                    in_units(row["msg_size_bytes"]),
                    str(row["count"]),
                    *(f"{row[key]:.3f}" for key in figures),
                )
                for name, row in pairs
            ),
        ]
    )


def engine_lines(counts: EngineCollectives, names: Sequence[str] | None = None) -> list[str]:
    """Return the table of an engine's collectives, those that sent most first. ``names``: of these
    operations only. They overlap computation, so a line has the time that computation waited for
    them instead of their latency.
    """
    rows = [row for row in counts.rows.values() if names is None or row.operation in names]
    return aligned(
        [
            ("operation", "of", "size", "calls", "waited (ms)", "per call (ms)", "group"),
            *(
                (
                    row.operation,
                    _readable(row.unit),
                    in_units(row.nbytes // row.count),
                    str(row.count),
                    f"{row.waited:.3f}",
                    f"{row.waited / row.count:.3f}",
                    row.group,
                )
                for row in sorted(rows, key=lambda row: -row.wire)
            ),
        ]
    )


def _readable(unit: str) -> str:
    """Return the name of a unit, or the key of a flat buffer in words."""
    name, *kind = unit.split("|")
    return " ".join([name or "(root)", *([f"({' '.join(kind)})"] if kind else [])])


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Return the mean without this part of the smallest and of the largest values; 0.0 for none."""
    if not 0.0 <= trim_percent < 0.5:
        raise ConfigError(f"trim_percent is {trim_percent}; give a number in [0, 0.5)")
    cut = int(trim_percent * len(data))
    middle = sorted(data)[cut : len(data) - cut]
    return sum(middle) / len(middle) if middle else 0.0
