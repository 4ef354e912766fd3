"""The ways people call a model, on two threaded ranks against the oracle in fp32.

The fast suite runs each at stage 3, and some at one of the other stages, which take turns; the long
one runs the product.
"""

from __future__ import annotations

import itertools

import pytest

from tests.helpers import oracle
from tests.helpers.cells import fast
from tests.helpers.engines import STAGES, engine_opener, train_on_threads
from tests.helpers.training import Plan
from tests.helpers.ways import WAYS

PLAN = Plan(ranks=2, steps=2, accumulation=2)  # the second in the order that the first has recorded
# the stage below 3 that a way meets in the fast suite
TURN = {name: index // 8 % 3 for index, name in enumerate(WAYS) if index % 8 == 0}


@pytest.mark.parametrize(
    "name, stage",
    fast(itertools.product(WAYS, STAGES), lambda name, stage: stage in (TURN.get(name), 3)),
)
def test_way(name, stage):
    way = WAYS[name]
    oracle.compare(train_on_threads(way, PLAN, engine_opener(stage)), oracle.kept(way, PLAN))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_way_on_other_rank_counts(way, stage, ranks):
    plan = Plan(ranks=ranks, steps=3, accumulation=1, clip=1.0)
    oracle.compare(train_on_threads(way, plan, engine_opener(stage)), oracle.kept(way, plan))


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_way_in_16_bits(way, stage, precision):
    plan = Plan(ranks=2, steps=3, accumulation=2, precision=precision)
    got = train_on_threads(way, plan, engine_opener(stage))
    exact = oracle.kept(way, Plan(ranks=2, steps=3, accumulation=2))
    oracle.compare_mixed(got, oracle.mixed(way, plan, stage), exact, plan.dtype)
