"""Starts processes that have the simulated device, with one mode of lateness each.

They are forked from one that has loaded the device, torch and what most of them import
(``tests/helpers/python_server.py``): one that poses as CUDA, one that does not.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.launch.hosts import free_port
from tests.helpers import launched
from tests.helpers.python_server import server
from tests.late import build

ROOT = Path(__file__).resolve().parents[2]
MODELS = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "t5"))


def needs_the_device() -> None:
    """Skip where it cannot be built, with the reason."""
    if reason := build.why_not():
        pytest.skip(reason)
    build.library()


def environment(as_cuda: bool = False, **more: str) -> dict[str, str]:
    """Return the environment of a process with the device; ``as_cuda``: the device poses as CUDA,
    in all processes that it starts. Skips the test where it cannot, as the kernels of a build with
    CUDA would run in place of those of the device.
    """
    if as_cuda and torch.version.cuda:
        pytest.skip("this build of torch has CUDA: HF_ZERO_TORCH=cpu scripts/test runs this test")
    own = {name: value for name, value in os.environ.items() if not name.startswith("LATE_")}
    path = [str(ROOT)]
    own["LATE_AS"] = "cuda" if as_cuda else "late"
    if as_cuda:
        path.insert(0, str(ROOT / "tests/late/site"))
        own["LATE_ALL"] = "1"
    if "PYTHONPATH" in own:
        path.append(own["PYTHONPATH"])
    own |= {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    if "LATE_CACHE" in os.environ:
        own["LATE_CACHE"] = os.environ["LATE_CACHE"]
    return own | more


@cache
def python(as_cuda: bool = True) -> str:
    """A command that runs Python in a fork of a process that has the device."""
    engine = ("torch", "tests.helpers.engine_imports", "transformers", "accelerate", *MODELS)
    running = (
        server(environment(True, LATE_FORKS="1"), engine, "sitecustomize:begin")
        if as_cuda
        else server(environment(), ("tests.late.device",), "tests.late.device:set_devices")
    )
    atexit.register(running.__exit__, None, None, None)
    return running.__enter__()


def of(env: Mapping[str, str]) -> str:
    """The command that runs Python in a process of ``env``, which has the device or has not."""
    if "LATE_AS" not in env:
        return launched.python()
    return python(env["LATE_AS"] == "cuda")


def run(
    module: str,
    *arguments: str,
    seconds: float = 240,
    env: Mapping[str, str] | None = None,
    interpreter: str = "",
) -> str:
    """Return the output of ``python -m module arguments``, errors included.

    A process that fails raises AssertionError with the end of its output. ``interpreter``: run that
    Python instead of a fork.
    """
    own = environment() if env is None else env
    return _run(interpreter or of(own), [own], [module, *arguments], seconds)[0]


def pass_tests(own: Mapping[str, str], *arguments: str, seconds: float) -> None:
    """Run pytest with ``arguments`` in the environment ``own``; some test passes, and none fails or
    is skipped.
    """
    out = run(
        "pytest",
        *("-o", "addopts=", "-q", *arguments),
        seconds=seconds,
        env=own,
        interpreter=sys.executable,  # its own: hf_zero is what torch looks for as it is imported
    )
    assert re.search(r"\d passed", out) and not re.search(r"\d (skipped|failed)", out), out


def run_ranks(
    module: str,
    *arguments: str,
    ranks: int = 2,
    seconds: float = 400,
    env: Mapping[str, str] | None = None,
    hosts: int = 1,
) -> Sequence[dict[str, Any]]:
    """The rows of ``python -m module arguments`` on ranks that have a device each, posing as CUDA,
    or that have ``env``; they are told that they are of ``hosts`` hosts.
    """
    here = ranks // hosts
    quiet = {"HF_ZERO_LOG_LEVEL": "ERROR", "LATE_MODE": "inline"}
    own = {
        **(environment(True) if env is None else env),
        **quiet,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(here),
    }
    each = [{**own, "RANK": str(rank), "LOCAL_RANK": str(rank % here)} for rank in range(ranks)]
    printed = _run(of(own), each, [module, *arguments], seconds)
    return [row for output in printed for row in rows(output)]


def _run(
    interpreter: str, environs: Sequence[Mapping[str, str]], words: Sequence[str], seconds: float
) -> list[str]:
    """Return the outputs of ``interpreter -m words`` with each of ``environs``, run in parallel.
    All must succeed within ``seconds`` together.
    """
    command, limit = [interpreter, "-m", *words], time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        logs = [Path(folder) / f"{number}.txt" for number in range(len(environs))]
        started = [
            stack.enter_context(launched.running(command, ROOT, log, environ))
            for log, environ in zip(logs, environs)
        ]
        codes = [launched.ended(each, max(0.0, limit - time.monotonic())) for each in started]
        for code, log in zip(codes, logs):
            assert code == 0, (
                f"{words} ended with {code} (None: after {seconds} s)\n{log.read_text()[-8000:]}"
            )
        return [log.read_text() for log in logs]


def rows(output: str) -> Sequence[dict[str, Any]]:
    """The lines of JSON in ``output``."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]
