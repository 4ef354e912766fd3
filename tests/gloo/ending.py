"""A training script whose rank ``odd`` ends in the way that is asked for; test_endings.py starts
it, plainly or by a launcher.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch

from hf_zero.parameters import wrap
from tests.helpers.broken_stacks import Latecomer
from tests.helpers.engines import config_of, start
from tests.helpers.models import features, seeded
from tests.helpers.stacks import squared
from tests.helpers.training import At, plain_sgd

wrap.GRANULARITY = 0  # blocks are small, and each is to be a unit


def end(engine: Any, rank: int, way: str) -> None:
    if way == "kill":
        os.kill(os.getpid(), 9)
    elif way == "raise":
        raise ValueError("bad batch\nof many lines")
    elif way == "shape":
        engine(torch.ones(3, 99))
    elif way == "device":
        engine(features(0, 0, rank).to("meta")).mean().item()
    elif way == "dtype":
        engine(torch.ones(3, 7, dtype=torch.long))
    elif way == "late":
        engine.module.late = True


def train(rank: int, way: str, odd: int, stage: int) -> None:
    torch.set_num_threads(1)
    model = seeded(Latecomer)
    engine = start(model, plain_sgd(model), config_of(stage, timeout=300))
    for at in range(5):
        if rank == odd and at == 2:
            time.sleep(1.0)  # the others wait by now
            end(engine, rank, way)
            if way == "finish":
                return
        engine.backward(squared(engine, At(at, 0, rank)))
        engine.step()


def spawned(rank: int, port: str, way: str, odd: int, stage: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
    )
    train(rank, way, odd, stage)


if __name__ == "__main__":
    way, odd, stage = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if "RANK" in os.environ:
        train(int(os.environ["RANK"]), way, odd, stage)
    else:
        torch.multiprocessing.spawn(spawned, (os.environ["MASTER_PORT"], way, odd, stage), nprocs=2)
