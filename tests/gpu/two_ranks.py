"""Rank of test_two_ranks_on_one_gpu.py over gloo, whose messages may be in device memory."""

from __future__ import annotations

import json
import os
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
from tests.gpu.test_engine_on_gpu import loss_of
from tests.helpers.random_states import Life, check
from tests.helpers.stacks import stack

STEPS = 6
SEEDS = int(os.environ.get("HF_ZERO_SEEDS", 12))


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
    {"lives": lives, "float8": float8_gathers}[sys.argv[1]]()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
