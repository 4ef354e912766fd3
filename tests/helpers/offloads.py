"""Ways of offloading, by name: what a configuration says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PIECE = 4096  # elements: small enough that the flats of the tests have several pieces

WAYS = (
    "optimizer on cpu",
    "all on cpu",
    "optimizer in files",
    "all in files",
    "half on cpu",
    "parameters on cpu",
)


def stages_of(way: str) -> tuple[int, ...]:
    return (3,) if way.startswith(("all", "parameters")) else (0, 1, 2, 3)


def offload(way: str, stage: int, folder: Path, **more: Any) -> dict[str, Any]:
    """The section ``zero_optimization`` for ``way``; ``more`` are keys of offload_optimizer."""
    files = way.endswith("files")
    optimizer: dict[str, Any] = {
        "device": "nvme" if files else "cpu",
        "buffer_size": PIECE,
        "buffer_count": 3,
    }
    if files:
        optimizer["nvme_path"] = str(folder)
    if way.startswith("half"):
        optimizer["ratio"] = 0.5
    section: dict[str, Any] = {"stage": stage}
    if not way.startswith("parameters"):
        section["offload_optimizer"] = optimizer | more
    if way.startswith(("all", "parameters")):
        section["offload_param"] = (
            {"device": "nvme", "nvme_path": str(folder), "max_in_cpu": 20_000}
            if files
            else {"device": "cpu"}
        )
    return section
