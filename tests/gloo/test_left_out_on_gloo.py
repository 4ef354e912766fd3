"""Ranks that leave out blocks, on processes: with gloo, and with a backend of which the engine
knows nothing.
"""

from __future__ import annotations

import pytest

from tests.helpers import oracle
from tests.helpers.backends import PLAIN, join_again
from tests.helpers.engines import engine_opener, train_on_rank
from tests.helpers.left_out import LeftOut, at_random, on_one
from tests.helpers.processes import run_processes, say
from tests.helpers.training import Plan, Trace, merge

COMPILED = {"compile": {"blocks": True, "backend": "aot_eager"}}
# backend, stage, accumulation, what is left out, checkpoints, configuration
Case = tuple[str, int, int, object, object, dict[str, object]]


def job_of(case: Case) -> LeftOut:
    what = case[3]
    if what == "random":
        return LeftOut(20, at_random(20, 0.3), case[4])
    rank, *blocks = what
    return LeftOut(14, on_one(rank, *blocks, since=1), case[4])


def train_cases(rank: int, ranks: int, cases: list[Case]) -> list[Trace]:
    traces = []
    for number, case in enumerate(cases):
        backend, stage, accumulation, *_, more = case
        say(f"{case}")
        join_again(backend, f"case {number}")
        plan, job = Plan(ranks=ranks, steps=3, accumulation=accumulation), job_of(case)
        traces.append(
            train_on_rank(
                rank, {rank: job.build()}, job, plan, engine_opener(stage, timeout=60, **more)
            )
        )
    return traces


def check(ranks: int, cases: list[Case], timeout: float) -> None:
    answers = run_processes(ranks, train_cases, ranks, cases, timeout=timeout)
    for number, case in enumerate(cases):
        job, plan = job_of(case), Plan(ranks=ranks, steps=3, accumulation=case[2])
        try:
            oracle.compare(
                merge([each[number] for each in answers]),
                oracle.run(job, plan),
                weight_floor=oracle.ROUNDING,
            )
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def cases_on(backend: str) -> list[Case]:
    return [
        (backend, 3, 1, (1, 10), None, {}),
        (backend, 3, 1, (0, 13, 12, 11, 10, 9), None, {}),
        (backend, 3, 1, (1, 0, 1, 2, 3, 4, 5), None, {}),
        (backend, 3, 1, "random", False, {}),
    ]


def test_two_processes():
    more: Case = (PLAIN, 3, 3, "random", None, {})
    check(2, [*cases_on("gloo")[3:], *cases_on(PLAIN)[2:3], more], timeout=400)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [3, 4])
def test_more_processes(ranks):
    cases: list[Case] = [
        (backend, stage, accumulation, "random", checkpoints, {})
        for backend in ("gloo", PLAIN)
        for stage in (0, 1, 2, 3)
        for accumulation in (1, 3)
        for checkpoints in (None, False, True)
    ]
    cases.append((PLAIN, 3, 1, (1, 4, 5), None, COMPILED))
    check(ranks, [*cases, *cases_on("gloo"), *cases_on(PLAIN)], timeout=590)
