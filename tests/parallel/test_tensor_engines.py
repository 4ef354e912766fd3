"""Engines whose ranks share layers, against one plain process."""

from __future__ import annotations

import pytest

from tests.helpers.oracle import compare, kept
from tests.helpers.tensor_parallel import TensorJob, train_tensor_parallel
from tests.helpers.training import Plan, plain_sgd

STAGES = (0, 1, 2, 3)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("accumulation", (1, 2))
def test_two_ranks_share_the_layers(stage: int, accumulation: int) -> None:
    plan, job = Plan(accumulation=accumulation, steps=2, clip=0.5), TensorJob("llama", plain_sgd)
    compare(train_tensor_parallel(job, plan, 2, stage), kept(job, plan))


@pytest.mark.parametrize("stage", STAGES)
def test_groups_read_different_batches(stage: int) -> None:
    plan, job = Plan(ranks=2, accumulation=2, steps=2), TensorJob("qwen3", plain_sgd)
    compare(train_tensor_parallel(job, plan, 2, stage), kept(job, plan))
