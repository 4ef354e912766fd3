"""Rank of test_two_ranks_on_one_gpu.py: trains at each stage over gloo, whose messages may be in
device memory, and prints the losses of the whole batch; a model whose branches are on two streams,
and prints each rank's losses; random lives of training state, and prints what is not as in one
process; float8 layers, and prints losses and bytes of gathers in bf16 and in float8. NCCL refuses
two ranks of one device.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

import hf_zero
from hf_zero.zero.layout import wrap
from tests.gpu.test_engine_on_gpu import batches, loss_of
from tests.helpers.engines import STAGES
from tests.helpers.random_states import Life, check
from tests.helpers.stacks import stack
from tests.late import training

STEPS = 6
SEEDS = int(os.environ.get("HF_ZERO_SEEDS", 12))
SLOW = 4_000_000  # cycles that a delayed stream sleeps at most: some 2 ms


def losses(stage: int, more: dict[str, object]) -> list[float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": 4 // world,
        "zero_optimization": {"stage": stage, **more},
        "gradient_clipping": 1.0,
    }
    model = stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    found = []
    for inputs in batches():
        loss = loss_of(engine, inputs.chunk(world)[rank])
        engine.backward(loss)
        engine.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        found.append(whole.item() / world)
    engine.destroy()
    return found


def losses_of_branches(job: str) -> list[float]:
    """Both streams sleep for a while before some of the blocks, at random."""
    chosen, delays = training.config(job), random.Random(dist.get_rank())
    model, on_gpu = training.tower(branches=chosen.pop("branches")), torch.cuda.is_available()
    for block in model.blocks if on_gpu else ():
        block.register_forward_pre_hook(
            lambda *_: torch.cuda._sleep(delays.randrange(SLOW)) if delays.random() < 0.3 else None
        )
    engine = hf_zero.initialize(model=model, config=chosen)[0]
    found = []
    micros = STEPS * chosen["gradient_accumulation_steps"]
    for values in training.batches(micros, dist.get_rank(), dist.get_world_size()):
        loss = engine(values.to(engine.device))
        engine.backward(loss)
        engine.step()
        found.append(loss.detach())
    engine.destroy()
    return [loss.item() for loss in found]


def on_both(world: int, fn: Callable[..., Any], *args: Any, build: Callable[[], Any]) -> list[Any]:
    """Run ``fn`` as this rank, as on_ranks does on threads; return what both ranks have seen."""
    mine, both = fn(dist.get_rank(), build(), *args), [None] * world
    dist.all_gather_object(both, (mine.seen, mine.frozen))
    return [SimpleNamespace(seen=seen, frozen=frozen) for seen, frozen in both]  # type: ignore


def difference_of(life: Life) -> str:
    """Return how ``life`` on both ranks differs from one process, or ""."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    try:
        check(life, Path(folder[0]), on_both, "cuda" if torch.cuda.is_available() else "cpu")
    except AssertionError as error:
        return str(error)
    return ""


def trainings() -> None:
    on_cpu = {"offload_optimizer": {"device": "cpu"}}
    for stage in STAGES:
        for name, more in {"": {}, "offload": on_cpu}.items():
            if name and stage == 0:
                continue
            found = losses(stage, more)
            if dist.get_rank() == 0:
                print("LOSSES " + json.dumps([stage, name, found]), flush=True)
    for job in training.BRANCHES:
        told = [job, dist.get_rank(), losses_of_branches(job)]
        print("BRANCHES " + json.dumps(told) + "\n", end="", flush=True)


def lives() -> None:
    """Lives in fp32: those in bf16 are compared with an engine of one rank."""
    for seed in range(SEEDS):
        if not (life := Life.drawn(seed).on(2)).bf16:
            told = [seed, dist.get_rank(), difference_of(life)]
            print("LIVES " + json.dumps(told) + "\n", end="", flush=True)


def float8_config(gathers: bool, rows: int, **more: object) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    section = {"recipe": "tensorwise", "gather_weights": gathers, "emulate": not on_gpu}
    return {
        "train_micro_batch_size_per_gpu": rows,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": True},
        "float8_training": section,
        **more,
    }


def float8_losses(model: Any, config: dict[str, Any]) -> tuple[list[float], int]:
    """Return the losses of this rank, and the bytes of its gathers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    found = []
    for inputs in wide_batches(dist.get_rank()):
        loss = loss_of(engine, inputs.to(engine.device))
        engine.backward(loss)
        engine.step()
        found.append(loss.detach())
    sent = engine.mesh.stats.bytes["all_gather"]
    engine.destroy()
    return [loss.item() for loss in found], sent


def wide_batches(rank: int) -> list[torch.Tensor]:
    """Matrices of float8 have multiples of 16 rows and columns."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(32, 7, generator=generator) for _ in range(STEPS)]


def float8_gathers() -> None:
    for gathers in (False, True):
        found, sent = float8_losses(stack(), float8_config(gathers, 32))
        told = [gathers, dist.get_rank(), found, sent]
        print("FLOAT8 " + json.dumps(told) + "\n", end="", flush=True)


def main() -> None:
    wrap.GRANULARITY = wrap.PERSISTENCE = 0  # the blocks of the model are small
    dist.init_process_group("gloo")
    {"trainings": trainings, "lives": lives, "float8": float8_gathers}[sys.argv[1]]()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
