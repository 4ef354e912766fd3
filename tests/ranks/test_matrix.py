"""The oracle matrix: stage × ranks × accumulation × precision × architecture.

The fast suite runs two steps of a covering choice: every stage meets every other setting; the
long one five of the product.
"""

from __future__ import annotations

import itertools

import pytest

from tests.helpers import oracle
from tests.helpers.engines import STAGES, engine_opener, train_on_threads
from tests.helpers.models import ARCHITECTURES
from tests.helpers.training import ArchitectureJob, Plan, adamw, sgd

RANKS, ACCUMULATION, PRECISIONS = (1, 2, 4), (1, 4), ("fp32", "bf16", "fp16")
NAMES = tuple(ARCHITECTURES)
PRODUCT = list(itertools.product(STAGES, RANKS, ACCUMULATION, PRECISIONS, NAMES))


def covering() -> list[tuple]:
    """Per stage: each architecture in fp32 and in one of the 16-bit precisions; these, ranks and
    accumulation take turns.
    """
    cells = []
    for stage in STAGES:
        for index, (precision, name) in enumerate(itertools.product(PRECISIONS, NAMES)):
            turn = (NAMES.index(name) + stage) % 2
            if precision in ("fp32", PRECISIONS[1 + turn]):
                cells.append(
                    (
                        stage,
                        RANKS[(index + stage) % 3],
                        ACCUMULATION[(index // 2 + stage) % 2],
                        precision,
                        name,
                    )
                )
    return cells


def check(steps: int, stage: int, ranks: int, accumulation: int, precision: str, name: str) -> None:
    job = ArchitectureJob(ARCHITECTURES[name])
    plan = Plan(ranks=ranks, steps=steps, accumulation=accumulation, precision=precision)
    got = train_on_threads(job, plan, engine_opener(stage))
    exact = oracle.kept(job, Plan(ranks=ranks, steps=steps, accumulation=accumulation))
    if precision == "fp32":
        oracle.compare(got, exact)
    else:
        oracle.compare_mixed(
            got,
            oracle.mixed(job, plan, stage),
            exact,
            plan.dtype,
            oracle.factor_at(stage, plan.ranks),
        )


@pytest.mark.parametrize("stage, ranks, accumulation, precision, name", covering())
def test_against_the_oracle(stage, ranks, accumulation, precision, name):
    check(2, stage, ranks, accumulation, precision, name)


@pytest.mark.long
@pytest.mark.parametrize("stage, ranks, accumulation, precision, name", PRODUCT)
def test_the_product(stage, ranks, accumulation, precision, name):
    check(5, stage, ranks, accumulation, precision, name)


@pytest.mark.turns
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name, ranks", [("bert", 3), ("t5", 2)])
def test_sgd_leaves_the_same_weights(stage, name, ranks):
    """Adam forgives a gradient that is off by a factor; SGD does not.

    Three ranks: an uneven cut.
    """
    job = ArchitectureJob(ARCHITECTURES[name], sgd)
    job.name += " with sgd"
    plan = Plan(ranks=ranks, steps=3, accumulation=2, clip=2.0)
    oracle.compare(
        train_on_threads(job, plan, engine_opener(stage)),
        oracle.kept(job, plan),
        weight_floor=oracle.ROUNDING,
    )


def test_the_covering_choice_covers():
    """Each stage meets each rank count, each accumulation and each precision; architectures meet
    each precision, in fp32 at each stage.
    """
    for stage in STAGES:
        cells = [cell for cell in covering() if cell[0] == stage]
        assert {cell[1] for cell in cells} == set(RANKS)
        assert {cell[2] for cell in cells} == set(ACCUMULATION)
        assert {cell[3] for cell in cells} == set(PRECISIONS)
        assert (
            {cell[4] for cell in cells if cell[3] == "fp32"}
            == {cell[4] for cell in cells if cell[3] != "fp32"}
            == set(NAMES)
        )
    for stages in ((0, 1), (2, 3)):
        assert {cell[3:] for cell in covering() if cell[0] in stages} == set(
            itertools.product(PRECISIONS, NAMES)
        )
    assert adamw is ArchitectureJob(ARCHITECTURES["bert"]).make_optimizer
