"""The recipe of SLURM: its job script against stand-ins for SLURM's commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.test_recipes import RECIPES, module_of

SLURM = RECIPES / "slurm"
JOB = SLURM / "train_on_slurm.sh"


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that imports a script of the recipe."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    return lambda name: module_of(SLURM / name)


def run_job(tmp_path: Path, srun: str, told: bool = False) -> tuple[int, list[str], list[str]]:
    """Return the exit code of the job script, and the arguments of ``srun`` and ``scontrol``."""
    for name, does in {"srun": srun, "scontrol": ""}.items():
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {path}.called\n{does}\n')
        path.chmod(0o755)
    environment = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    started = subprocess.Popen(["bash", str(JOB), "--num_iterations", "9"], env=environment)
    calls = [tmp_path / f"{name}.called" for name in ("srun", "scontrol")]
    while told and started.poll() is None and not calls[0].exists():
        time.sleep(0.02)
    if told:
        started.send_signal(signal.SIGTERM)
        (tmp_path / "told").touch()
    code = started.wait(30)
    return code, *(call.read_text().split() if call.exists() else [] for call in calls)


@pytest.mark.parametrize(("code", "told"), [(1, False), (85, True)])
def test_the_job_is_requeued_where_ranks_stopped(
    tmp_path: Path, imported: Any, code: int, told: bool
) -> None:
    wait = f"while [ ! -e {tmp_path}/told ]; do sleep 0.02; done\n" if told else ""
    ended, srun, scontrol = run_job(tmp_path, f"{wait}exit {code}", told)
    assert ended == code and scontrol == (["requeue", "7"] if told else [])
    at = srun.index("train_on_slurm.py")
    assert srun[at - 1] == "python"
    script = imported("train_on_slurm.py")
    args = script.parse_args(srun[at + 1 :])
    assert args.output_dir == Path("runs/slurm-7") and args.num_iterations == 9
    assert script.STOPPED == 85
