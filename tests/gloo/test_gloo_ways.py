"""The engine's features over real gloo processes: ways to call a model and a slice of the matrix,
few bits, messages of several units, gathers in two hops, loops over weights that are left early.
One launch runs many cases inside the same processes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests.helpers import one_bit, oracle
from tests.helpers.compressed import GRADIENTS, check_gradients, compressible, trained
from tests.helpers.engines import (
    STAGES,
    engine_opener,
    train_on_rank,
)
from tests.helpers.models import ARCHITECTURES, Stack, seeded
from tests.helpers.processes import run_processes, say
from tests.helpers.training import ArchitectureJob, Plan, merge
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


# ---- fewer bits ----

RANKS = 3
ONE = Plan(precision="bf16")
CASES: list[tuple[int, Plan, dict[str, Any], dict[str, Any]]] = [
    (1, Plan(steps=2, precision="bf16"), {}, {"compressed_communication": {"bits": 4}}),
    (3, Plan(steps=2, precision="bf16"), {**GRADIENTS, "zero_quantized_weights": True}, {}),
]


def trained_in_turn(rank):
    sent: list[int] = []
    isend = dist.isend

    def counted(tensor, *args, **kwargs):
        sent.append(tensor.nbytes)
        return isend(tensor, *args, **kwargs)

    dist.isend = counted
    answers = []
    for stage, plan, zero, more in CASES:
        say(f"stage {stage}")
        sent.clear()
        answers.append((trained(rank, seeded(Stack), stage, plan, zero, more), list(sent)))
    say("1 bit")
    sent.clear()
    answers.append((one_bit.trained(rank, seeded(Stack), ONE), list(sent)))
    return answers


def test_fewer_bits():
    answers = run_processes(RANKS, trained_in_turn)
    one_bit.check([answer[-1][0] for answer in answers], ONE)
    for answer in answers:
        seen, sent = answer[-1]
        for state in seen[0][1].values():
            message = one_bit.nbytes(state["layout"])
            # to each other rank, up and down, in each step after the freeze
            assert sent.count(message) >= 2 * (RANKS - 1) * (one_bit.STEPS - one_bit.FREEZE)
    for number, (stage, plan, _, _) in enumerate(CASES):
        check_gradients([answer[number][0] for answer in answers], stage, plan)
        for answer in answers:
            (_, layouts), sent = answer[number]
            for layout in [layout for layout, _ in layouts.values() if compressible(layout)]:
                four = -(-layout.chunk // 32) * 16 + -(-layout.chunk // 512) * 16
                eight = -(-layout.chunk // 16) * 16 + -(-layout.chunk // 2048) * 16
                # to each other rank: up, and down, in each of two steps
                assert sent.count(four) >= 2 * (RANKS - 1) * (2 if stage == 1 else 1)
                assert (sent.count(eight) >= 2 * (RANKS - 1)) == (stage == 3)
                assert 2 * layout.chunk not in sent


# ---- gathers in two hops ----

NODES, NODE = 4, 2  # ranks, and those of a node
