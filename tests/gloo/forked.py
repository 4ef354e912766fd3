"""Two ranks that are forked from a process which has trained alone: ``forked.py PORT WAY``. Each
prints its rank, the size of its world, and what it has done in this WAY: the weights after a step,
or nothing more than to divide sequences or layers.
"""

import json
import multiprocessing
import os
import sys

import torch

import hf_zero

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    "zero_optimization": {"stage": 1},
    "timeout": 60,
}
torch.set_num_threads(1)


def train(rank: int) -> list[object]:
    torch.manual_seed(0)
    engine = hf_zero.initialize(model=torch.nn.Linear(2, 1, bias=False), config=CONFIG)[0]
    engine.backward(engine(torch.tensor([[rank + 1.0, rank - 2.0]])).square().sum())
    engine.step()
    return [rank, engine.world_size, engine.module.weight.tolist()]


def divide(rank: int) -> list[object]:
    if sys.argv[2] == "sequences":
        hf_zero.sequence_parallel(2)
    else:
        hf_zero.PipelineModule([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)], num_stages=2)
    return [rank, torch.distributed.get_world_size()]


def run(rank: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    line = json.dumps((train if sys.argv[2] == "step" else divide)(rank)) + "\n"
    torch.distributed.barrier()  # the first rank holds the store that the other connects through
    os.write(1, line.encode())  # at once: both ranks write to one pipe


train(0)
ranks = [multiprocessing.get_context("fork").Process(target=run, args=(rank,)) for rank in (0, 1)]
for each in ranks:
    each.start()
for each in ranks:
    each.join(100)
codes = [each.exitcode for each in ranks]
for each in ranks:
    each.kill()
sys.exit(0 if codes == [0, 0] else f"the ranks ended with {codes}")
