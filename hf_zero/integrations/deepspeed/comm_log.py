"""The log of ``deepspeed.comm``'s collectives: how often, how many bytes, how long.

It counts what the script itself calls. The engine's own gathers and reductions are spans of a
profile (``hf_zero/spans.py``).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hf_zero.device import kinds
from hf_zero.distributed import process_group, world_group
from hf_zero.logs import logger

Times = dict[str, dict[int, list[float]]]


class CommLog:
    """Milliseconds of each call, by operation and bytes of its largest argument."""

    def __init__(self) -> None:
        self.enabled = False
        self.all = True
        self.operations: Sequence[str] = ()
        self.verbose = False
        self.times: Times = defaultdict(lambda: defaultdict(list))

    def wants(self, name: str, prof: bool) -> bool:
        """Whether a call of the operation ``name`` is logged."""
        return self.enabled and (self.all or prof or name in self.operations)

    def timed(
        self, name: str, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        """Call ``function`` and record it; the device is waited for before and after."""
        device = process_group.default_device()
        kinds.synchronize(device)
        begin = time.perf_counter()
        answer = function(*args, **kwargs)
        if hasattr(answer, "wait"):
            answer.wait()
        kinds.synchronize(device)
        took = (time.perf_counter() - begin) * 1e3
        size = max(map(_bytes, (*args, *kwargs.values())), default=0)
        self.times[name][size].append(took)
        if self.verbose:
            logger.info("%s of %d bytes took %.3f ms", name, size, took)
        return answer


LOGGED = CommLog()


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Switch the log on or off: of all operations, or of those named in ``prof_ops`` and calls
    with ``prof=True``.
    """
    for name, value in (
        ("enabled", enabled),
        ("all", prof_all),
        ("operations", prof_ops),
        ("verbose", verbose),
    ):
        if value is not None:
            setattr(LOGGED, name, value)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print on rank 0 what was logged (collective). ``return_dict``: return it, on every rank its
    own; ``show_straggler``: with the milliseconds by which each operation's ranks differ in all.
    """
    summary = {
        name: {size: _row(size, times) for size, times in sizes.items()}
        for name, sizes in LOGGED.times.items()
    }
    totals = {
        name: sum(row["total_latency_ms"] for row in rows.values())
        for name, rows in summary.items()
    }
    spread = None
    if show_straggler and process_group.is_initialized():
        every = world_group.get_world_group().all_gather_object(totals, "the log of collectives")
        ranks = {name: [each.get(name, 0.0) for each in every] for name in totals}
        spread = {name: max(times) - min(times) for name, times in ranks.items()}
    if process_group.get_rank() == 0:
        for name, rows in summary.items():
            for row in rows.values():
                print(
                    f"{name}: {row['msg_size_str']} x {row['count']}, "
                    f"{row['avg_latency_ms']:.3f} ms each, {row['tput_avg_gbps']:.2f} Gbit/s"
                )
        for name, milliseconds in (spread or {}).items():
            print(f"{name}: ranks differ by {milliseconds:.3f} ms")
    if not return_dict:
        return None
    where = {"world_size": process_group.get_world_size(), "rank": process_group.get_rank()}
    return {
        "summary": summary,
        "straggler_analysis": spread,
        "metadata": {**where, "timestamp": time.strftime("%Y-%m-%dT%H:%M:%S")},
    }


def _row(size: int, times: Sequence[float]) -> dict[str, Any]:
    total = sum(times)
    rate = size * len(times) * 8e-6 / total if total else 0.0
    world = process_group.get_world_size()
    return {
        "count": len(times),
        "total_latency_ms": total,
        "avg_latency_ms": total / len(times),
        "tput_avg_gbps": rate,
        "busbw_avg_gbps": rate * (world - 1) / world,
        "msg_size_bytes": size,
        "msg_size_str": f"{size / 1024:.1f} KiB",
    }


def reset_log() -> None:
    LOGGED.times.clear()


def has_comm_data() -> bool:
    return bool(LOGGED.times)


def get_comm_operation_count() -> int:
    return sum(len(times) for sizes in LOGGED.times.values() for times in sizes.values())


def get_logged_comm_ops() -> list[str]:
    return list(LOGGED.times)
