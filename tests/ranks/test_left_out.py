"""Ranks that leave out blocks, each its own in every step: numbers are the oracle's, with zeros for what was left out."""

from __future__ import annotations

import pytest

from tests.helpers import oracle
from tests.helpers.cells import fast
from tests.helpers.engines import engine_opener, train_on_threads
from tests.helpers.left_out import LeftOut, at_random, on_one
from tests.helpers.training import Plan

COMPILED = {"blocks": True, "backend": "aot_eager"}


def check(job: LeftOut, ranks: int, accumulation: int, stage: int, steps: int = 3, **more: object) -> None:
    plan = Plan(ranks=ranks, steps=steps, accumulation=accumulation)
    trace = train_on_threads(job, plan, engine_opener(stage, **more))
    oracle.compare(trace, oracle.run(job, plan), weight_floor=oracle.ROUNDING)


ENDS = [(13, 12, 11, 10, 9), (10,), (0, 1, 2, 3, 4, 5)]
ONE = [(rank, blocks, since, stage) for rank in (0, 1) for blocks in ENDS for since in (0, 2) for stage in (0, 1, 2, 3)]


@pytest.mark.parametrize("rank, blocks, since, stage", fast(ONE, lambda rank, blocks, since, stage: stage == 3 or (rank, since) == (1, 2)))
def test_one_rank_leaves_out_blocks(rank, blocks, since, stage):
    check(LeftOut(14, on_one(rank, *blocks, since=since)), 2, 1, stage)


@pytest.mark.parametrize("ranks, accumulation, checkpoints", [(2, 3, None), (3, 1, False), (4, 1, True)])
def test_each_rank_leaves_out_its_own_at_random(ranks, accumulation, checkpoints):
    check(LeftOut(40, at_random(40, 0.3), checkpoints), ranks, accumulation, 3)


def test_over_replicas():
    check(LeftOut(12, at_random(12, 0.5)), 4, 1, 3, replicate_size=2)


def test_compiled_blocks():
    check(LeftOut(10, at_random(10, 0.4)), 2, 1, 3, steps=2, compile=COMPILED)


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("checkpoints", [None, False, True])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_at_random_everywhere(ranks, accumulation, checkpoints, stage):
    check(LeftOut(40, at_random(40, 0.3), checkpoints), ranks, accumulation, stage, steps=6)
