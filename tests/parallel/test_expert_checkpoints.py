"""Checkpoints of models whose experts are on several ranks: resumed on others, converted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hf_zero
from hf_zero.parallel.expert.model import expert_parallel
from hf_zero.zero.access.consolidate import whole_state_dict
from tests.helpers.engines import config_of, start
from tests.helpers.models import tokens
from tests.helpers.ranks import run_ranks
from tests.helpers.training import At, adamw
from tests.parallel.expert_cases import keys
from tests.parallel.test_moe_layer import MixedJob, part_of
from tests.ranks.test_moe import Routed

GROUPS = 12  # micro-batches of a step, whatever the number of ranks


def engine_of(whole: nn.Module, stage: int, size: int) -> Any:
    model = copy.deepcopy(whole)
    accumulation = GROUPS // torch.distributed.get_world_size()
    config = {**config_of(stage, **keys(size)), "gradient_accumulation_steps": accumulation}
    return start(model, adamw(model), config)


def step(engine: Any, rank: int, number: int) -> None:
    for micro in range(engine.gradient_accumulation_steps()):
        ids = tokens(number, micro * engine.world_size + rank, 0)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, 2, 3), (4, 2, 1)), ((3, 3, 1), (2, 1, 3)), ((2, 1, 2), (2, 2, 2))],
    ids=["2 columns from 1", "no axis from 3 ranks", "2 ranks from no axis"],
)
def test_on_other_ranks(before, after, tmp_path):
    """(ranks, expert ranks, stage) of the save and of what goes on from it."""
    whole = Routed("mixtral").build()

    def save(rank):
        engine = engine_of(whole, before[2], before[1])
        step(engine, rank, 0)
        engine.save_checkpoint(tmp_path, tag="t")
        saved = whole_state_dict(engine)
        step(engine, rank, 1)
        further = whole_state_dict(engine)
        engine.destroy()
        return saved, further

    saved, further = run_ranks(before[0], save)[0]
    converted = dict(hf_zero.checkpoint.iterate_state_dict(tmp_path, dtype="float32"))
    assert all(saved[name].equal(converted[name]) for name in saved)
    assert {name: p.shape for name, p in whole.named_parameters()} == {
        name: value.shape for name, value in saved.items() if name in dict(whole.named_parameters())
    }

    def go_on(rank):
        engine = engine_of(whole, after[2], after[1])
        engine.load_checkpoint(tmp_path, tag="t")
        loaded = whole_state_dict(engine)
        step(engine, rank, 1)
        trained = whole_state_dict(engine)
        engine.destroy()
        return loaded, trained

    for loaded, trained in run_ranks(after[0], go_on):
        assert all(loaded[name].equal(saved[name]) for name in saved)
        for name, value in trained.items():
            torch.testing.assert_close(value, further[name], rtol=1e-5, atol=2e-5)


def test_state_dicts_are_whole_without_an_engine():
    """Before one takes the model and after it is destroyed."""
    whole = Routed("mixtral").build()
    given = {key: value.clone() for key, value in whole.state_dict().items()}

    def run(rank):
        model = expert_parallel(copy.deepcopy(whole), 2)
        assert all(model.state_dict()[key].equal(value) for key, value in given.items())
        model.load_state_dict({key: value + 1 for key, value in given.items()})
        assert all(model.state_dict()[key].equal(value + 1) for key, value in given.items())
        model.load_state_dict(given)
        engine = start(model, adamw(model), config_of(3, **keys(2)))
        step(engine, rank, 0)
        trained = whole_state_dict(engine, dtype=torch.float32)
        engine.destroy(gather=True)
        assert all(model.state_dict()[key].equal(value) for key, value in trained.items())
        assert not trained["model.embed_tokens.weight"].equal(given["model.embed_tokens.weight"])

    run_ranks(2, run)


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, 2, 3), (4, 4, 1)), ((4, 2, 1), (1, 1, 0)), ((2, 1, 2), (4, 2, 3))],
    ids=["4 ranks from 2", "1 rank from 2 of 4", "2 of 4 from no axis"],
)
def test_layers_of_deepspeed(before, after, tmp_path):
    """(ranks, expert ranks, stage) of the save and of what goes on from it: experts stand under
    their numbers among all.
    """
    job = MixedJob("top 2")
    whole = job.build()

    def train(engine, at):
        engine.backward(job.loss(engine, At(at, 0, 0)))  # the same on all ranks
        engine.step()
        return whole_state_dict(engine, dtype=torch.float32)

    def opened(size, stage):
        model = part_of(whole, size, **job.options)
        return start(model, adamw(model), config_of(stage))

    def save(rank):
        engine = opened(*before[1:])
        saved = train(engine, 0)
        engine.save_checkpoint(tmp_path, tag="t")
        hf_zero.checkpoint.save_whole(engine, tmp_path, "whole.safetensors")
        further = train(engine, 1)
        engine.destroy()
        return saved, further

    saved, further = run_ranks(before[0], save)[0]
    assert saved.keys() == whole.state_dict().keys()
    converted = dict(hf_zero.checkpoint.iterate_state_dict(tmp_path / "t", dtype="float32"))
    written = load_file(tmp_path / "whole.safetensors")
    for name, value in saved.items():
        assert value.equal(converted[name]) and value.equal(written[name]), name

    def go_on(rank):
        engine = opened(*after[1:])
        engine.load_checkpoint(tmp_path, tag="t")
        loaded, trained = whole_state_dict(engine, dtype=torch.float32), train(engine, 1)
        engine.destroy()
        return loaded, trained

    for loaded, trained in run_ranks(after[0], go_on):
        for name, value in saved.items():
            assert value.equal(loaded[name]), name
            torch.testing.assert_close(trained[name], further[name], rtol=1e-5, atol=2e-5)
