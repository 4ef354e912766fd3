"""Starts processes that have the simulated device, with one mode of lateness each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hf_zero.hosts.reaching import free_port
from tests.late import build

ROOT = Path(__file__).resolve().parents[2]


def needs_the_device() -> None:
    """Skip where it cannot be built, with the reason."""
    if reason := build.why_not():
        pytest.skip(reason)
    build.library()


def environment(as_cuda: bool = False, **more: str) -> dict[str, str]:
    """Of a process with the device; ``as_cuda``: it poses as CUDA, in all processes it starts."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("LATE_")}
    path = [str(ROOT)]
    if as_cuda:
        path.insert(0, str(ROOT / "tests/late/site"))
        own |= {"LATE_AS": "cuda", "LATE_ALL": "1"}
    if "PYTHONPATH" in own:
        path.append(own["PYTHONPATH"])
    own |= {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    if "LATE_CACHE" in os.environ:
        own["LATE_CACHE"] = os.environ["LATE_CACHE"]
    return own | more


def run(
    module: str, *arguments: str, seconds: float = 240, env: Mapping[str, str] | None = None
) -> str:
    """What ``python -m module arguments`` printed.

    A process that fails is an error with its end.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, env=dict(env or environment()), cwd=ROOT, capture_output=True, text=True,
        timeout=seconds, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        raise AssertionError(f"{module} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def run_ranks(
    module: str, *arguments: str, ranks: int = 2, seconds: float = 400
) -> Sequence[dict[str, Any]]:
    """The rows of ``python -m module arguments`` on ranks that have a device each, all of them
    posing as CUDA.
    """
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    quiet = {"HF_ZERO_LOG_LEVEL": "ERROR", "LATE_MODE": "inline"}

    def start(rank: int) -> Sequence[dict[str, Any]]:
        own = environment(True, RANK=str(rank), LOCAL_RANK=str(rank), **shared, **quiet)
        return rows(run(module, *arguments, seconds=seconds, env=own))

    with ThreadPoolExecutor(ranks) as pool:
        return [row for found in pool.map(start, range(ranks)) for row in found]


def rows(output: str) -> Sequence[dict[str, Any]]:
    """The lines of JSON in ``output``."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]
