"""Two ranks that share one GPU, over gloo: equal to the plain loop at every stage, with branches of
a model on two streams, and in random lives of training state.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.launch.hosts import free_port
from tests.gpu import two_ranks
from tests.gpu.test_engine_on_gpu import plain
from tests.helpers.engines import STAGES
from tests.helpers.stacks import stack
from tests.late import training

PROGRAM = Path(__file__).with_name("two_ranks.py")


def run(what: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port()), str(PROGRAM), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def printed() -> str:
    return run("trainings")


def told(printed: str, what: str) -> list[Any]:
    lines = [line for line in printed.splitlines() if line.startswith(what)]
    return [json.loads(line.removeprefix(what)) for line in lines]


def test_losses_equal_the_plain_loop(printed: str) -> None:
    want = plain(stack(), torch.float32)
    rows = told(printed, "LOSSES ")
    kinds = {(stage, name) for stage, name, _ in rows}
    assert kinds == {(stage, how) for stage in STAGES for how in ("", "offload")} - {(0, "offload")}
    for stage, how, found in rows:
        assert found == pytest.approx(want, rel=1e-5), (stage, how)


def test_branches_on_two_streams_equal_the_plain_loop(printed: str) -> None:
    rows = told(printed, "BRANCHES ")
    assert {(job, rank) for job, rank, _ in rows} == {
        (job, rank) for job in training.BRANCHES for rank in range(2)
    }
    for job, rank, found in rows:
        want = training.plain(job, two_ranks.STEPS, rank, 2)
        assert found == pytest.approx(want, rel=1e-4), (job, rank)


def test_state_as_in_one_process() -> None:
    rows = told(run("lives"), "LIVES ")
    assert {rank for _, rank, _ in rows} == {0, 1}
    assert not [row for row in rows if row[2]]
