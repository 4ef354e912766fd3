"""Two ranks that share one GPU, over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from hf_zero.launch.hosts import free_port

PROGRAM = Path(__file__).with_name("two_ranks.py")


def run(what: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port()), str(PROGRAM), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def told(printed: str, what: str) -> list[Any]:
    lines = [line for line in printed.splitlines() if line.startswith(what)]
    return [json.loads(line.removeprefix(what)) for line in lines]


def test_state_as_in_one_process() -> None:
    rows = told(run("lives"), "LIVES ")
    assert {rank for _, rank, _ in rows} == {0, 1}
    assert not [row for row in rows if row[2]]
