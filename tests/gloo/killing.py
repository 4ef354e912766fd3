"""Two ranks that train and save after every step until they are killed; test_killed.py starts them
again and again.

Each rank is one process of a fork server that has imported everything, so that a start costs a
fraction of a second. It says over a pipe where it is: ``loaded STEP``, ``saving STEP``, ``saved
STEP``. Whatever it holds at a step is compared with what an uninterrupted run held there.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.helpers.engines import config_of, start
from tests.helpers.models import features, seeded
from tests.helpers.training import adamw

WIDTH, LAYERS = 7, 3


class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        # Bytes to write, so that a save takes a while and is hit in the middle of its data.
        self.ballast = torch.nn.Parameter(torch.zeros(1 << 18))

    def forward(self, batch):
        for layer in self.layers:
            batch = torch.tanh(layer(batch))
        return batch.square().mean() + (self.ballast * batch.sum()).square().mean()


@dataclass(frozen=True)
class Plan:
    """``tag``: all saves go over the same one, else each step has its own and ``keep`` of them
    stay.
    """

    folder: Path
    stage: int
    steps: int
    tag: str | None = None
    keep: int | None = None


def digest(engine):
    """Return a hash of this rank's master weights, moments, step counts, counters and LR schedule,
    bit for bit.
    """
    found = hashlib.sha256()
    for flat in engine.flats:
        for name, tensor in sorted(engine.bound.tensors(flat.optimizer_shard).items()):
            found.update(
                f"{flat.key} {name}".encode()
                + tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
            )
    numbers = [
        engine.bound.scalars(),
        engine.bound.hyperparameters(),
        vars(engine.counters),
        engine.lr_scheduler.state_dict(),
    ]
    found.update(json.dumps(numbers, sort_keys=True, default=str).encode())
    return found.hexdigest()


def rank_main(rank, port, plan, expected, pipe):
    """``expected``: this rank's digest after 0, 1, 2 … steps; empty: say them."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    os.environ.update(GLOO_SOCKET_IFNAME="lo", HF_ZERO_LOG_LEVEL="ERROR")
    model = seeded(Wide)
    schedule = {
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": 5, "total_num_steps": 500, "warmup_max_lr": 1e-2},
        }
    }
    engine = start(model, adamw(model), {**config_of(plan.stage, timeout=60), **schedule})

    def compare():
        at, held = engine.counters.global_steps, digest(engine)
        if expected and held != expected[at]:
            pipe.send(("differs", at))
            os._exit(3)
        if not expected:
            pipe.send(("digest", held))

    # Without `latest` no save has ended yet.
    if (plan.folder / "latest").exists():
        engine.load_checkpoint(str(plan.folder), verify=True)
    compare()
    pipe.send(("loaded", engine.counters.global_steps))
    while engine.counters.global_steps < plan.steps:
        step = engine.counters.global_steps
        engine.backward(engine(features(step, 0, rank)))
        engine.step()
        compare()
        pipe.send(("saving", step + 1))
        engine.save_checkpoint(str(plan.folder), tag=plan.tag, keep=plan.keep)
        pipe.send(("saved", step + 1))
    pipe.send(("done", plan.steps))
    pipe.close()
    os._exit(0)  # the end of a group is not what is looked at
