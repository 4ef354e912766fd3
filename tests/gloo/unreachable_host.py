"""A training script for test_unreachable_hosts.py, one rank of several hosts. It trains until it is
ended by an error, or until the file ``stop`` exists; it says the monotonic time of each step.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from tests.helpers.engines import config_of, start
from tests.helpers.stacks import run_steps, stack
from tests.helpers.training import adamw


def train(rank: int, host_timeout: float, stop: Path) -> None:
    torch.set_num_threads(1)
    model = stack()
    engine = start(model, adamw(model), config_of(3, host_timeout=host_timeout))
    for step in range(1_000_000):
        run_steps(engine, rank, [step])
        print(f"step {step} at {time.monotonic():.2f}", flush=True)
        flag = torch.tensor([float(stop.exists())])
        torch.distributed.all_reduce(flag)
        if flag.item():
            break
        time.sleep(0.1)
    engine.destroy()
    print("destroyed", flush=True)


if __name__ == "__main__":
    try:
        train(int(os.environ["RANK"]), float(sys.argv[1]), Path(sys.argv[2]))
    finally:
        print(f"through at {time.monotonic():.2f}", flush=True)
