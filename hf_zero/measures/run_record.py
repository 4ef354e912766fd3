"""Records of a run beside its figures, for a reader of ``metrics.jsonl``: the header of each start,
the warnings of rank 0, and the end.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import socket
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hf_zero.device import kinds
from hf_zero.logging import JsonObject, first_line, logger
from hf_zero.measures.metrics_file import MetricsFile
from hf_zero.planning.needs import STATE_OF_PART, Needs, needs
from hf_zero.zero.layout.engine_plan import EnginePlan

if TYPE_CHECKING:
    from hf_zero.zero.training_engine import TrainingEngine

PACKAGES = (
    "hf-zero", "torch", "transformers", "accelerate", "trl", "peft", "lightning", "datasets",
    "triton", "torchao", "safetensors", "numpy",
)  # fmt: skip
MOST = 200  # warnings that are kept
BUFFERS = "buffers of a step"


def run_header(engine: TrainingEngine, plan: EnginePlan) -> JsonObject:
    """Return the header of a run (collective): versions, hosts with their ranks and devices, the
    mesh, the model, the configuration with its sources, and the bytes of rank 0 that were predicted
    before training.
    """
    mesh, model = engine.mesh, plan.model
    described = socket.gethostname(), engine.global_rank, device_name(engine.device)
    every = mesh.job.all_gather_object(described, "hosts of a run")
    dims = {name: size for name, size in asdict(mesh.dims).items() if name != "data" and size > 1}
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "program": Path(sys.argv[0]).name,
        "versions": dict(_versions()),
        "hosts": [
            {"host": host, "ranks": ranks, "device": device}
            for (host, device), ranks in _by_host(every).items()
        ],
        "ranks": mesh.dims.world,
        "stage": engine.stage,
        "precision": engine.config.precision,
        "mesh": {"shards": mesh.shard.size, "replicas": mesh.replicate.size, **dims},
        "model": type(model).__name__,
        "optimizer": None if plan.optimizer is None else type(plan.optimizer).__name__,
        "parameters": sum(flat.spec.layout.numel for flat in plan.flats),
        "units": len(plan.units),
        "config": [row._asdict() | {"value": plain(row.value)} for row in engine.config.explain()],
        "predicted": list(predicted_rows(needs(plan))),
    }


def _by_host(every: Iterable[tuple[str, int, str]]) -> dict[tuple[str, str], list[int]]:
    """Return the ranks of each host and device."""
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for host, device, rank in sorted((host, device, rank) for host, rank, device in every):
        ranks_of.setdefault((host, device), []).append(rank)
    return ranks_of


def predicted_rows(needed: Needs) -> Iterator[dict[str, str | int]]:
    """Yield the predicted bytes by tier, kind of state and name; what is no state is a buffer."""
    for tier, parts in (("device", needed.device), ("ram", needed.ram), ("disk", needed.disk)):
        for part in parts:
            kind = STATE_OF_PART.get(part.what, BUFFERS)
            yield {"tier": tier, "kind": kind, "what": part.what, "bytes": part.nbytes}


def note_end(file: MetricsFile, process: int) -> None:
    """Append the end of an engine to ``file``, with the error that ends ``process``, if any. No-op
    in a forked child, such as a worker of a DataLoader.
    """
    if os.getpid() == process:
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        # an interactive session keeps the last error and goes on
        if error is None or hasattr(sys, "ps1"):
            file.note("ended", "")
        else:
            file.note("ended", first_line(error))


def plain(value: object) -> object:
    """Return ``value`` if JSON has it, otherwise as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def device_name(device: torch.device) -> str:
    """Return the name of the model of ``device``."""
    if kinds.is_synchronous(device):
        return f"CPU, {platform.machine()}"
    return str(getattr(kinds.properties(device), "name", device.type))


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    yield "system", platform.platform(terse=True)
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


class WarningRecords(logging.Handler):
    """Append warnings and errors of the logger to ``file``, each text once, until :meth:`close`."""

    def __init__(self, file: MetricsFile):
        super().__init__(logging.WARNING)
        self._file = weakref.ref(file)  # which ends with its engine, though nobody destroys that
        self._seen: set[str] = set()
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        file = self._file()
        if file is not None and text not in self._seen and len(self._seen) < MOST:
            self._seen.add(text)
            file.note(record.levelname.lower(), text)

    def close(self) -> None:
        logger.removeHandler(self)
        super().close()
