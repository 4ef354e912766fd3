"""The plan of an engine of a model that tensor and expert parallelism are about to cut is the plan
of its cut parts, on each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.parallel.expert.model import spread_experts
from hf_zero.parallel.planned_cuts import planned_cuts, planned_dims
from tests.helpers.cells import fast
from tests.helpers.models import seeded
from tests.helpers.plans import planned, rows_of
from tests.helpers.ranks import run_ranks
from tests.helpers.tensor_parallel import deepseek, llama, mixtral, olmo2, phi3, qwen3
from tests.parallel.test_moe_layer import Mixed

OFFLOAD = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}


def few_heads() -> nn.Module:
    return llama(key_value_heads=1)


def tied() -> nn.Module:
    return llama(tied=True)


CASES: list[tuple[Callable[[], nn.Module], int, int, int]] = [
    *((make, 2, 2, 1) for make in (llama, few_heads, tied, qwen3, olmo2, phi3, deepseek)),
    (llama, 4, 2, 1),
    (mixtral, 2, 1, 2),
    (mixtral, 4, 2, 2),
    (mixtral, 4, 1, 2),
]


@pytest.mark.parametrize("stage", fast([1, 3], lambda stage: stage == 3))
@pytest.mark.parametrize(
    ("make", "ranks", "tensor", "expert"),
    fast(CASES, lambda make, ranks, *_: ranks == 4 or make in (llama, few_heads)),
)
def test_the_plan_is_the_same_before_and_after(
    make: Callable[[], nn.Module], ranks: int, tensor: int, expert: int, stage: int
) -> None:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 40, **OFFLOAD}
    config = {"bf16": {"enabled": True}, "zero_optimization": zero}
    models = [seeded(make) for _ in range(ranks)]

    def on_rank(rank: int) -> tuple[Any, Any]:
        model, dims = models[rank], ParallelDims.over(ranks, tensor=tensor, expert=expert)
        cuts = planned_cuts(model, tensor, expert, dims, rank)
        before = rows_of(planned(model, config, dims, rank=rank, cuts=cuts))
        if tensor > 1:
            hf_zero.tensor_parallel(model, tensor)
        if expert > 1:
            hf_zero.expert_parallel(model, expert)
        parallel = get_parallel()
        assert parallel is not None and parallel.dims == dims
        assert not planned_cuts(model, tensor, 1, dims, rank)
        return before, rows_of(planned(model, config, dims, rank=rank))

    for before, after in run_ranks(ranks, on_rank):
        assert before == after


def test_experts_of_layers() -> None:
    """Layers that were made with an expert-parallel size hold other experts on each rank."""
    models = [seeded(lambda: Mixed(ep_size=2)) for _ in range(2)]
    config = ZeroConfig(3, bf16=True).resolve(2)

    def on_rank(rank: int) -> tuple[Any, Any]:
        model = models[rank]
        dims = planned_dims(model, ParallelDims(2))
        cuts = planned_cuts(model, 1, 1, dims, rank)
        before = rows_of(planned(model, config, dims, rank=rank, cuts=cuts))
        spread_experts(model, config)
        return before, rows_of(planned(model, config, dims, rank=rank))

    for before, after in run_ranks(2, on_rank):
        assert before == after and any("expert" in row[1] for row in after)
