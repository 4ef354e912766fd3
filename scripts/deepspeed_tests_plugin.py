"""The pytest plugin of ``deepspeed_tests``: it runs the wanted tests and records the result of each
at once.

DeepSpeed's distributed tests run in processes that a forkserver makes. Here that server imports
torch and deepspeed once, by importing this module, instead of every process on its own. What a rank
raises is written down by the rank: another rank may wait for it until the test's time is over.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch  # noqa: F401

FOLDER = Path(os.environ["DEEPSPEED_TESTS_FOLDER"])
EVENTS, WANTED = FOLDER / "events", FOLDER / "wanted.json"


def write(**event: Any) -> None:
    with EVENTS.open("a") as file:
        file.write(json.dumps(event | {"at": time.monotonic()}) + "\n")


def name_of(nodeid: str) -> str:
    """``runtime/test_pld.py::TestIt::test``, without the folder of all tests."""
    return nodeid.removeprefix("unit/")


def said(text: str) -> str:
    """The line of a traceback that says most, without paths of this machine."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    shown = [line[2:].strip() for line in lines if line.startswith("E ")] or lines
    errors = [line for line in shown if re.match(r"[\w.]*(Error|Exception|Failed|Timeout)\b", line)]
    line = (errors or [line for line in shown if line] or ["failed"])[-1]
    asserted = [line for line in shown if line.startswith("assert ")]
    if line == "AssertionError" and asserted:
        line = f"AssertionError: {asserted[-1]}"
    line = re.sub(r" at 0x[0-9a-f]+", "", line)
    return re.sub(r" ?\(?/[^\s)]*/[^\s)]*\)?", "", line)[:200].strip().replace("|", "/")


def recorded(run: Any) -> Any:
    @functools.wraps(run)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except (Exception, pytest.fail.Exception) as error:
            write(raised=said(f"{type(error).__name__}: {error}".partition("\n")[0]))
            if isinstance(error, Exception):
                raise
            raise AssertionError(str(error)) from None  # the pool would never hear of the other

    return wrapper


_ = deepspeed.initialize  # loads the engine
if sys.argv[0] == "-c" and os.environ["HF_ZERO_AUTOLOAD"] == "0":
    # the server of DeepSpeed itself, which compiles these and keeps them for all processes
    for builder in ("ShareMemCommBuilder", "FusedAdamBuilder", "CPUAdamBuilder"):
        deepspeed.accelerator.get_accelerator().create_op_builder(builder).load(verbose=False)
with suppress(ImportError):  # where pytest starts, its folder is not in the path yet
    from unit.common import DistributedExec

    DistributedExec._dist_run = recorded(DistributedExec._dist_run)


def pytest_configure() -> None:
    multiprocessing.set_forkserver_preload([__name__])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    names = [name_of(item.nodeid) for item in items]
    write(collected=names)
    if WANTED.is_file():
        wanted = set(json.loads(WANTED.read_text()))
        items[:] = [item for item, name in zip(items, names) if name in wanted]


def pytest_collectreport(report: Any) -> None:
    name = name_of(report.nodeid)
    if report.failed:
        write(not_collected=name, said=said(report.longreprtext))
    elif report.skipped:
        write(not_collected=name, said=f"skipped: {said(str(report.longrepr[2]))}")


def pytest_runtest_logstart(nodeid: str) -> None:
    write(starts=name_of(nodeid))


def pytest_runtest_logreport(report: Any) -> None:
    name = name_of(report.nodeid)
    if report.failed:
        write(ends=name, said=said(report.longreprtext))
    elif report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "expected to fail"
        write(ends=name, said=f"skipped: {said(str(reason).removeprefix('Skipped: '))}")
    elif report.when == "teardown":
        write(ends=name, said="passed")
