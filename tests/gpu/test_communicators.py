"""Communicators of NCCL on one GPU: split from the job's own, with the options of the keys."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hf_zero
from tests.gpu.communicators import KEYS
from tests.helpers.stacks import stack

PROGRAM = Path(__file__).with_name("communicators.py")


def test_a_bound_job_splits_its_communicator() -> None:
    command = [sys.executable, str(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_EFFICIENCY
    fields = {**KEYS, "cta_policy": policy}
    values = [float(number) for number in range(8)]
    assert rows == [
        {"job": job, "splits": 1, "high priority": high, **fields, "values": values}
        for job in (0, 1)
        for high in (True, False)
    ]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("stage", (1, 3))
def test_training_with_the_keys_equals_the_plain_loop(stage: int) -> None:
    world = dist.group.WORLD
    assert world is not None and world.bound_device_id is None, "one rank needs no communicator"
    model = stack()
    plain = copy.deepcopy(model).cuda()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-6, fused=True)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "nccl": KEYS,
    }
    ours = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    engine = hf_zero.initialize(model=model, optimizer=ours, config=config)[0]
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        inputs = torch.randn(4, 7, generator=generator).cuda()
        want = plain(inputs).square().mean()
        want.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = engine(inputs).square().mean()
        engine.backward(loss)
        engine.step()
        assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    engine.destroy()
