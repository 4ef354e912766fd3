"""Mixtures of experts over real gloo processes: one launch runs all cases inside the same
processes.
"""

from __future__ import annotations

import pytest

from tests.helpers import oracle
from tests.helpers.engines import engine_opener, train_on_rank
from tests.helpers.processes import run_processes, say
from tests.helpers.training import Job, Plan, Trace, merge
from tests.ranks.test_moe import MODELS, PATTERNS, Flat, Layered, Patterned, Routed

Cell = tuple[str, str, int]  # what kind of job, its name, the stage

KINDS = {
    "model": Routed,
    "layered": lambda name: Patterned(Layered, name),
    "flat": lambda name: Patterned(Flat, name),
}


def job_of(cell: Cell) -> Job:
    return KINDS[cell[0]](cell[1])


def train_cells(rank: int, cells: list[Cell], plan: Plan) -> list[Trace]:
    traces = []
    for cell in cells:
        say(str(cell))
        job = job_of(cell)
        traces.append(train_on_rank(rank, {rank: job.build()}, job, plan, engine_opener(cell[2])))
    return traces


def check(ranks: int, cells: list[Cell], timeout: float) -> None:
    plan = Plan(ranks=ranks, steps=4, accumulation=2)
    answers = run_processes(ranks, train_cells, cells, plan, timeout=timeout)
    for index, cell in enumerate(cells):
        oracle.compare(
            merge([traces[index] for traces in answers]), oracle.kept(job_of(cell), plan)
        )


@pytest.mark.long
def test_experts_on_two_processes():
    patterns = ("none on one rank in one step", "in step 2 as never before")
    check(
        2,
        [
            ("model", "mixtral", 3),
            *(("flat", name, 3) for name in patterns),
            ("layered", patterns[0], 2),
        ],
        timeout=300,
    )


@pytest.mark.long
def test_more_experts_on_three_processes():
    kinds = [*(("model", name) for name in MODELS), *(("flat", name) for name in PATTERNS)]
    check(3, [(kind, name, 3) for kind, name in kinds], timeout=400)
