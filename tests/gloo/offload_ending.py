"""A training script under offload to files, whose rank ``odd`` ends in the way that is asked
for; test_offload_endings.py starts it.
"""

from __future__ import annotations

import os
import resource
import sys
import time

import torch

from hf_zero.parameters import wrap
from tests.helpers.engines import config_of, start
from tests.helpers.stacks import squared, stack
from tests.helpers.training import At, Plan, adamw

wrap.GRANULARITY = 0  # blocks are small, and each is to be a unit

FAULTS = {"read": "read:20+:EIO", "write": "write:20+:ENOSPC"}


def train(way: str, odd: int, stage: int, disk: str) -> None:
    torch.set_num_threads(1)
    rank, model = int(os.environ["RANK"]), stack()
    nvme = {"device": "nvme", "nvme_path": disk}
    section = {"stage": stage, "offload_optimizer": {**nvme, "buffer_size": 4096}}
    if stage == 3:
        section["offload_param"] = {**nvme, "max_in_cpu": 0}
    if rank == odd and way in FAULTS:
        os.environ["HF_ZERO_IO_FAULT"] = FAULTS[way]
    if rank == odd and way == "no room":
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    engine = start(
        model,
        adamw(model),
        config_of(stage, Plan(clip=1.0), zero_optimization=section, timeout=300),
    )
    for step in range(30):
        if rank == odd and step == 2 and way == "kill":
            time.sleep(1.0)  # the other waits by now
            os.kill(os.getpid(), 9)
        engine.backward(squared(engine, At(step, 0, rank)))
        engine.step()


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
