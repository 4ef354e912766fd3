"""A fault at each call of the C library in a save, a load and conversions: the operation ends or
raises an error of hf-zero, and what it leaves is whole and blocks no second run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.faulty_operations import OPERATIONS
from tests.helpers.cells import fast

SOURCE = Path(__file__).with_name("faulty_calls.c")
LIMIT = 3600  # seconds; ends a process that hangs
FEW = (",".join(OPERATIONS), 2)  # in one process, of which each costs seconds of imports
CELLS = [FEW, *((name, None) for name in OPERATIONS)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler on Linux")
    built = tmp_path_factory.mktemp("library") / "faulty_calls.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(built), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return built


@pytest.mark.parametrize(("names", "sample"), fast(CELLS, lambda _, sample: sample))
def test_a_fault_at_a_call(names: str, sample: int | None, library: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz.faulty_operations", names]
    command += [] if sample is None else [str(sample)]
    environment = {"LD_PRELOAD": str(library), "FAULTY_FOLDER": str(tmp_path.resolve())}
    done = subprocess.run(
        command,
        env=os.environ | environment,
        cwd=SOURCE.parents[2],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    for name, report in json.loads(done.stdout).items():
        assert report["calls"] > 50 and report["met"]
        for each in report["wrong"]:
            raise AssertionError(f"{name}: {each['at']}: {each['raised']}\n{each['wrong']}")
