"""The comparison with the oracle accepts data parallelism that is right and rejects each known
way to get it wrong.
"""

from __future__ import annotations

import pytest
from torch import nn

from tests.helpers import oracle
from tests.helpers.engines import train_on_threads
from tests.helpers.hand import FAULTS, HandMade
from tests.helpers.models import ARCHITECTURES, seeded
from tests.helpers.training import ArchitectureJob, Plan, adamw, plain_sgd

PLAN = Plan(ranks=2, steps=3, accumulation=2, clip=0.5)


class WithUnused(ArchitectureJob):
    """BERT with a parameter that no forward uses."""

    def build(self):
        model = super().build()
        model.unused = seeded(lambda: nn.Linear(4, 4))
        return model


def job(make_optimizer=adamw) -> WithUnused:
    made = WithUnused(ARCHITECTURES["bert"], make_optimizer)
    made.name = f"bert with an unused layer, {make_optimizer.__name__}"
    return made


@pytest.mark.parametrize(
    "make_optimizer, floor", [(adamw, oracle.ADAM_ROUNDING), (plain_sgd, oracle.ROUNDING)]
)
def test_the_right_loop_is_accepted(make_optimizer, floor):
    got = train_on_threads(job(make_optimizer), PLAN, HandMade)
    oracle.compare(got, oracle.kept(job(make_optimizer), PLAN), weight_floor=floor)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_caught(fault):
    with pytest.raises(AssertionError, match=r"gradient|weights|differs between") as caught:
        oracle.compare(
            train_on_threads(job(), PLAN, lambda *a: HandMade(*a, fault)), oracle.kept(job(), PLAN)
        )
    if fault == "a tied weight counted twice":
        assert "bert.embeddings.word_embeddings.weight" in str(caught.value)


@pytest.mark.turns
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_loop_in_16_bits_passes_its_own_criterion_and_a_coarser_one_does_not(name, precision):
    plan = Plan(ranks=2, steps=5, accumulation=1, precision=precision)
    exact = oracle.kept(ArchitectureJob(ARCHITECTURES[name]), Plan(ranks=2, steps=5))
    mixed = oracle.kept(ArchitectureJob(ARCHITECTURES[name]), plan)
    oracle.compare_mixed(mixed, mixed, exact, plan.dtype)
    coarse = oracle.run(ArchitectureJob(ARCHITECTURES[name]), plan)
    for grads in coarse.grads:
        for grad in grads.values():
            grad += 0.1 * grad.abs()
    with pytest.raises(AssertionError, match="gradients: error"):
        oracle.compare_mixed(coarse, mixed, exact, plan.dtype)
