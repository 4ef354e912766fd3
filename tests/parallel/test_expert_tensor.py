"""Mixtures of experts whose layers and experts ranks share at once, against one process."""

from __future__ import annotations

import pytest

import hf_zero
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.errors import ConfigError
from tests.helpers import oracle
from tests.helpers.cells import in_one_item
from tests.helpers.stacks import on_each_rank
from tests.helpers.tensor_parallel import train_tensor_parallel
from tests.helpers.training import Plan
from tests.parallel.expert_cases import keys
from tests.ranks.test_moe import Routed


class Shared(Routed):
    """A mixture whose vocabulary two ranks can share."""

    def __init__(self, name):
        super().__init__(name)
        self.name, self.options = f"{name}, even", {**self.options, "vocab_size": 68}


def by_calls(model):
    """Before ``initialize``, as the Trainer cuts layers."""
    hf_zero.expert_parallel(hf_zero.tensor_parallel(model, 2), 2)


CELLS = [
    ("deepseek_v3", 3, {}),
    ("qwen2_moe", 1, {"prepare": by_calls, "activation_checkpointing": {"number_checkpoints": 2}}),
]


@in_one_item(CELLS)
def test_layers_and_experts_are_shared(cell):
    name, stage, more = cell
    plan = Plan(ranks=2, steps=2, accumulation=2)
    got = train_tensor_parallel(Shared(name), plan, 2, stage, **keys(2), **more)
    oracle.compare(got, oracle.kept(Shared(name), plan), weight_floor=oracle.ROUNDING)


@on_each_rank(4, build=lambda: Shared("mixtral").build())
def test_what_is_refused_leaves_the_job_as_it_was(rank, model):
    with pytest.raises(ConfigError, match="does not divide"):
        hf_zero.expert_parallel(model, 4)
    with pytest.raises(ConfigError, match="which no module or parameter"):
        hf_zero.tensor_parallel(model, 2, plan={"layers.*.nothing": "colwise"})
    with pytest.raises(ConfigError, match="is not a layer that its style"):
        hf_zero.tensor_parallel(model, 2, plan={"model.norm": "colwise"})
    assert get_parallel() is None
    for call in (hf_zero.tensor_parallel, hf_zero.expert_parallel):
        with pytest.raises(ConfigError, match=r"= 2\.0 is not a number of ranks"):
            call(model, 2.0)
    hf_zero.expert_parallel(model, 2)
    with pytest.raises(ConfigError, match=r"tensor_parallel before hf_zero\.expert_parallel"):
        hf_zero.tensor_parallel(model, 2)
