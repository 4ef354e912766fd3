"""Mixtures of experts whose layers and experts ranks share at once, against one process."""

from __future__ import annotations

import pytest
import torch

import hf_zero
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.errors import ConfigError
from hf_zero.parallel.tensor import agreement
from tests.helpers import oracle
from tests.helpers.cells import in_one_item
from tests.helpers.ranks import run_ranks
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


def test_one_sum_for_a_token(monkeypatch):
    """And not per pair of a token and an expert; the axis stays the one of the layers."""
    monkeypatch.setattr(agreement.Agreement, "compare", lambda *_: None)
    models = [Shared("mixtral").build() for _ in range(4)]

    def run(rank):
        model = hf_zero.tensor_parallel(models[rank], 2)
        before = get_parallel()
        model = hf_zero.expert_parallel(model, 2)
        groups = get_parallel()
        assert before is not None and groups is not None
        ids = torch.arange(16).view(2, 8) + 3
        model(input_ids=ids)
        assert groups.along("tensor") is before.along("tensor")
        stats = groups.stats["tensor"]
        stats.bytes.clear()
        model.eval()(input_ids=ids)
        return stats.bytes["all_reduce"], ids.numel()

    for sent, words in run_ranks(4, run):
        # the embedding, and attention and experts of two layers
        assert sent == (1 + 2 * 2) * words * 32 * 4


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
