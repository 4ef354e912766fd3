"""The engine's features over real gloo processes, and what engines that have ended leave behind:
no descriptor, thread, group, log or key. One launch runs many cases inside the same processes.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_zero.distributed.collective_log import CollectiveStats
from hf_zero.distributed.collectives import DimGroups, MeshDim
from hf_zero.distributed.hang_detection import Watchdog
from hf_zero.distributed.world_group import get_world_group
from tests.helpers import oracle
from tests.helpers.engines import (
    STAGES,
    engine_opener,
    train_on_rank,
)
from tests.helpers.leftovers import ENDINGS, await_threads, held_of_the_job, large, settle, working
from tests.helpers.models import ARCHITECTURES, seeded
from tests.helpers.offloads import DEVICE, offload, opened, train
from tests.helpers.processes import run_processes, say
from tests.helpers.tensor_parallel import llama
from tests.helpers.training import ArchitectureJob, Plan, adamw, merge
from tests.helpers.ways import WAYS

Cell = tuple[str, int, Plan]  # job, stage, plan


def job_of(name):
    return WAYS[name] if name in WAYS else ArchitectureJob(ARCHITECTURES[name])


def train_cells(rank, cells):
    traces = []
    for name, stage, plan in cells:
        say(f"{name} at stage {stage}, {plan}")
        job = job_of(name)
        traces.append(train_on_rank(rank, {rank: job.build()}, job, plan, engine_opener(stage)))
    return traces


def check(ranks, cells):
    answers = run_processes(ranks, train_cells, cells, timeout=600)
    for (name, stage, plan), traces in zip(cells, zip(*answers, strict=True), strict=True):
        try:
            oracle.accept(merge(traces), job_of(name), plan, stage)
        except AssertionError as error:
            raise AssertionError(f"{name!r} at stage {stage}: {error}") from error


def plan_of(ranks, **more):
    return Plan(**{"ranks": ranks, "steps": 3, "accumulation": 2, **more})


def test_an_architecture_at_each_stage_and_some_ways():
    """Stages 1 and 3 in 16 bits, and a way to call a model. Threads run all of them."""
    plan = plan_of(2, steps=2)
    cells: list[Cell] = [(name, stage, plan) for stage, name in zip(STAGES, ARCHITECTURES)]
    cells += [("bert", 1, plan_of(2, precision="fp16")), ("bert", 3, plan_of(2, precision="bf16"))]
    cells += [("each rank skips another block, by step", 3, plan_of(2))]
    check(2, cells)


@pytest.mark.long
def test_all_ways_on_three_processes():
    check(3, [(name, STAGES[at % 4], plan_of(3)) for at, name in enumerate(WAYS)])


NODES, NODE = 4, 2  # ranks, and those of a node


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
    """What remains after all ranks have ended their engine. Collective."""
    await_threads(others)
    for _ in range(2):  # what all ranks have left is known once all of them have left it
        dist.barrier()
        settle()
    dist.barrier()
    held = held_of_the_job()
    dist.barrier()
    return held


def train_and_end(rank, tmp_path):
    one_engine(rank, CASES[0], tmp_path)  # it saves: the keys of messages are made once
    get_world_group().watchdog.rank_status.read()  # as a long wait does
    seen, others = [], working()
    for number, case in enumerate(CASES):
        say(str(case))
        folder, held = tmp_path / str(number), []
        folder.mkdir(exist_ok=True)
        for _ in range(3):
            one_engine(rank, case, folder)
            gc.collect()
            held.append(look(others))
        seen.append(held)
    return seen


def test_what_the_job_holds_does_not_grow(tmp_path):
    """By the second engine of a kind what is made once is made."""
    answers = run_processes(2, train_and_end, tmp_path, timeout=590)
    for rank, seen in enumerate(answers):
        for case, (_, first, last) in zip(CASES, seen):
            assert last == first, f"rank {rank}, {case}"
            assert first["keys"] == seen[0][0]["keys"], f"rank {rank}, {case}"


def between_hosts(rank):
    """Gathered numbers, and the maximum, between the hosts of a device's ranks."""
    stats, off = CollectiveStats(), Watchdog()
    axis = MeshDim(range(3), rank, DimGroups(None, None, "nccl", torch.device("cpu")), stats, off)
    axis._follows = torch.device("cuda")  # whose messages no backend here takes
    assert axis.host_messages_on == torch.device("cpu")
    whole = torch.empty(3, 2, dtype=torch.int64)
    axis.all_gather([(whole.view(-1), torch.tensor([rank, 7 * rank]))], "numbers").wait()
    most = torch.tensor([rank, -rank, int(rank == 1)])
    plain = MeshDim(range(3), rank, DimGroups(None, None, "gloo"), stats, off)
    plain.all_reduce(most, "a few numbers", maximum=True).wait()
    return whole, axis.maximum_on_hosts([rank, -rank, int(rank == 1)], "numbers"), most.tolist()


def test_hosts_tell_each_other_numbers_beside_a_device():
    for whole, largest, most in run_processes(3, between_hosts, timeout=300):
        assert whole.tolist() == [[0, 0], [1, 7], [2, 14]] and largest == most == [2, 0, 1]
