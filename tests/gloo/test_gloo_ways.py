"""The same ways and a slice of the matrix over real gloo processes: one launch runs all cases
inside the same processes.
"""

from __future__ import annotations

import pytest

from tests.helpers import oracle
from tests.helpers.engines import STAGES, engine_opener, train_on_rank
from tests.helpers.models import ARCHITECTURES
from tests.helpers.processes import run_processes, say
from tests.helpers.training import ArchitectureJob, Job, Plan, Trace, merge
from tests.helpers.ways import WAYS

Cell = tuple[str, int, Plan]  # job, stage, plan


def job_of(name: str) -> Job:
    return WAYS[name] if name in WAYS else ArchitectureJob(ARCHITECTURES[name])


def train_cells(rank: int, cells: list[Cell]) -> list[Trace | str]:
    """Train each cell; a cell that raises gives its error and, as the ranks may now differ, ends
    the list.
    """
    traces: list[Trace | str] = []
    for name, stage, plan in cells:
        say(f"{name} at stage {stage}, {plan}")
        job = job_of(name)
        models = {rank: job.build()}
        try:
            traces.append(train_on_rank(rank, models, job, plan, engine_opener(stage)))
        except Exception as error:
            traces.append(f"{type(error).__name__}: {error}")
            break
    return traces


def check(ranks: int, cells: list[Cell], timeout: float) -> None:
    answers = run_processes(ranks, train_cells, cells, timeout=timeout)
    reached = min(len(traces) for traces in answers)
    for index, (name, stage, plan) in enumerate(cells[:reached]):
        traces = [answers[rank][index] for rank in range(ranks)]
        where = f"{name!r} at stage {stage} on {ranks} processes"
        broken = [
            f"rank {rank}: {trace}" for rank, trace in enumerate(traces) if isinstance(trace, str)
        ]
        assert not broken, f"{where} failed:\n" + "\n".join(broken)
        try:
            got = merge(traces)
            if plan.precision == "fp32":
                oracle.compare(got, oracle.kept(job_of(name), plan))
            else:
                exact = Plan(ranks=plan.ranks, steps=plan.steps, accumulation=plan.accumulation)
                factor = oracle.factor_at(stage, ranks)
                oracle.compare_mixed(
                    got,
                    oracle.mixed(job_of(name), plan, stage),
                    oracle.kept(job_of(name), exact),
                    plan.dtype,
                    factor,
                )
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from error
    assert reached == len(cells), f"only {reached} of {len(cells)} cells ran"


def cells_of(ranks: int, names: list[str], stages=STAGES) -> list[Cell]:
    return [
        (name, stage, Plan(ranks=ranks, steps=3, accumulation=2))
        for name in names
        for stage in stages
    ]


def mixed_cells(ranks: int) -> list[Cell]:
    plans = [
        Plan(ranks=ranks, steps=5, accumulation=2, precision=precision)
        for precision in ("bf16", "fp16")
    ]
    return [("bert", stage, plan) for stage in STAGES for plan in plans]


def some_cells() -> list[Cell]:
    """An architecture at each stage; stages 1 and 3 in 16 bits; some ways, at stages 1 and 3 in
    turn. Threads run all of them.
    """
    cells: list[Cell] = []
    for stage, name in zip(STAGES, ARCHITECTURES):
        cells += cells_of(2, [name], stages=(stage,))
    cells += [cell for at, cell in enumerate(mixed_cells(2)) if at in (3, 6)]
    for at, name in enumerate(sorted(WAYS)[::16]):
        cells += cells_of(2, [name], stages=((1, 3)[at % 2],))
    return cells


def test_architectures_and_some_ways_on_two_processes():
    check(2, some_cells(), timeout=400)


@pytest.mark.long
def test_all_ways_and_architectures_on_two_processes():
    check(2, cells_of(2, [*ARCHITECTURES, *WAYS]) + mixed_cells(2), timeout=500)


@pytest.mark.long
def test_all_ways_and_architectures_on_three_processes():
    check(3, cells_of(3, [*ARCHITECTURES, *WAYS]) + mixed_cells(3), timeout=600)
