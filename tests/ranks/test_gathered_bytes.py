"""The most that units gathered at once take at stage 3, as the preflight predicts it and as an
engine holds it.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_zero.planning.needs import gathered_bytes
from tests.helpers.engines import config_of, start
from tests.helpers.models import Stack, seeded
from tests.helpers.plans import planned
from tests.helpers.stacks import on_ranks, squared
from tests.helpers.training import At, adamw
from tests.helpers.training import Plan as Run

WIDTH, DEPTH = 48, 6
BLOCK = 18912  # bytes of a block of that width, in bf16


def deep() -> nn.Module:
    return seeded(lambda: Stack(depth=DEPTH, width=WIDTH))


@pytest.mark.turns
@pytest.mark.parametrize("prefetch, ahead", [(0, 0), (BLOCK // 2, 1), (BLOCK, 2), (50_000_000, 2)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_most_that_is_gathered_at_once(ranks, prefetch, ahead):
    zero = {"stage": 3, "stage3_prefetch_bucket_size": prefetch}

    def run(rank, model):
        engine = start(
            model, adamw(model), config_of(3, Run(precision="bf16"), zero_optimization=zero)
        )
        held: list[int] = []
        for unit in engine.units:

            def launch(*how, gather=unit.launch_gather, **named):
                gather(*how, **named)
                held.append(
                    sum(
                        flat.full.untyped_storage().nbytes()
                        for flat in engine.flats
                        if flat.sharded
                    )
                )

            unit.launch_gather = launch
        for number in range(3):
            engine.backward(squared(engine, At(number, 0, rank), torch.bfloat16))
            engine.step()
        return max(held)

    plan = planned(deep(), config_of(3, Run(precision="bf16"), zero_optimization=zero), ranks)
    predicted = gathered_bytes(plan)
    assert on_ranks(ranks, run, build=deep) == [predicted] * ranks
    root = sum(flat.spec.layout.numel for flat in plan.flats if not flat.unit.name) * 2
    assert predicted == pytest.approx(root + (1 + ahead) * BLOCK, abs=64)
