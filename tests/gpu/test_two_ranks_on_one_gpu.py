"""Two ranks that share one GPU, over gloo: equal to the plain loop at every stage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_zero.launch.hosts import free_port
from tests.gpu.test_engine_on_gpu import plain
from tests.helpers.engines import STAGES
from tests.helpers.stacks import stack

PROGRAM = Path(__file__).with_name("two_ranks.py")


def test_losses_equal_the_plain_loop() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port()), str(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("LOSSES ")]
    told = [json.loads(line.removeprefix("LOSSES ")) for line in lines]
    want = plain(stack(), torch.float32)
    kinds = {(stage, name) for stage, name, _ in told}
    assert kinds == {(stage, how) for stage in STAGES for how in ("", "offload")} - {(0, "offload")}
    for stage, how, found in told:
        assert found == pytest.approx(want, rel=1e-5), (stage, how)
