"""An engine that has ended leaves no file descriptor, thread, process group, log or key behind, on
gloo processes.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.leftovers import ENDINGS, await_threads, held_of_the_job, large, settle, working
from tests.helpers.models import seeded
from tests.helpers.offloads import DEVICE, offload, opened, train
from tests.helpers.processes import run_processes, say
from tests.helpers.tensor_parallel import llama
from tests.helpers.training import adamw

# how it ends, where its state is, stage, further configuration
Case = tuple[str, str, int, dict[str, Any]]
ASYNC: dict[str, Any] = {"checkpoint": {"async_save": True}}
TENSOR: dict[str, Any] = {"tensor_parallel": {"autotp_size": 2}}

CASES: list[Case] = [
    ("destroyed", DEVICE, 2, ASYNC),
    ("dropped", DEVICE, 3, {"replicate_size": 2}),
    ("exception", "all in files", 3, {}),
    ("destroyed", DEVICE, 3, TENSOR),
]
LONG: list[Case] = [
    (ending, way, stage, more)
    for ending in ENDINGS
    for way, stage in ((DEVICE, 0), (DEVICE, 3), ("optimizer in files", 1), ("all in files", 3))
    for more in ({}, ASYNC, {"replicate_size": 2})
]


def one_engine(rank, case, folder):
    ending, way, stage, more = case
    section = offload(way, stage, folder, max_in_cpu=0, buffer_size=1 << 16)
    if "tensor_parallel" in more:
        model = seeded(llama)
        engine = opened(model, section, adamw, **more)
        ids = torch.arange(12).view(2, 6)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    else:
        engine = opened(large(), section, adamw, **more)
        train(engine, rank, range(2))
        if "checkpoint" in more:
            engine.save_checkpoint(str(folder / "saved"))
    ENDINGS[ending](engine)


def look(others):
    """Measure what remains after all ranks have ended their engine; ``others`` are the threads of
    the job. Collective.
    """
    await_threads(others)
    for _ in range(2):  # what all ranks have left is known once all of them have left it
        dist.barrier()
        settle()
    dist.barrier()
    held = held_of_the_job()
    dist.barrier()
    return held


def train_and_end(rank, cases, times, tmp_path):
    one_engine(rank, cases[0], tmp_path)
    seen, others = [], working()
    for number, case in enumerate(cases):
        say(str(case))
        folder, held = tmp_path / str(number), []
        folder.mkdir(exist_ok=True)
        for _ in range(times):
            one_engine(rank, case, folder)
            gc.collect()
            held.append(look(others))
        seen.append(held)
    return seen


@pytest.mark.parametrize("cases", [CASES, pytest.param(LONG, marks=pytest.mark.long)])
def test_what_the_job_holds_does_not_grow(cases, tmp_path):
    """By the second engine of a kind what is made once is made."""
    answers = run_processes(2, train_and_end, cases, 3, tmp_path, timeout=590)
    for rank, seen in enumerate(answers):
        for case, (_, first, last) in zip(cases, seen):
            assert last == first, f"rank {rank}, {case}"
            assert first["keys"] == seen[0][0]["keys"], f"rank {rank}, {case}"
