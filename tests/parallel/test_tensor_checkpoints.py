"""Checkpoints of ranks that share layers or experts: resumed on other ranks and sizes,
and converted; state dicts of cut models without an engine.
"""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file

import hf_zero
from hf_zero.zero.access.consolidate import whole_state_dict
from tests.helpers.engines import config_of, start
from tests.helpers.ranks import run_ranks
from tests.helpers.tensor_parallel import MODELS
from tests.helpers.training import At, adamw, sgd
from tests.parallel.expert_cases import keys
from tests.parallel.test_moe_layer import MixedJob, part_of


def _train(name, size, groups, stage, folder, load, save):
    """Losses of two steps on ``groups`` groups of ``size`` ranks, and the whole weights."""
    models = [MODELS[name].build() for _ in range(size * groups)]
    config = config_of(stage, tensor_parallel={"autotp_size": size})

    def run(rank):
        engine = start(models[rank], sgd(models[rank]), config)
        if load:
            engine.load_checkpoint(str(folder))
        losses = []
        for step in range(2):
            # the same batch for every group, whatever their number
            loss = engine(**MODELS[name].batch(step + 10 * load, 0, 0)).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        if save:
            engine.save_checkpoint(str(folder))
        weights = whole_state_dict(engine, dtype=torch.float32)
        engine.destroy()
        return losses, weights

    return run_ranks(len(models), run)[0]


@pytest.mark.parametrize(
    ("name", "before", "after", "stage"),
    [("llama-tied", (2, 2), (1, 2), 1), ("gpt2", (2, 1), (4, 1), 3)],
    ids=str,
)
def test_resumed_and_converted(name, before, after, stage, tmp_path):
    """(tensor-parallel ranks, groups) of the save and of what goes on from it."""
    saved = tmp_path / "saved"
    _, weights = _train(name, *before, stage, saved, load=False, save=True)
    one = _train(name, *before, stage, saved, load=True, save=False)
    other = _train(name, *after, stage, saved, load=True, save=False)
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    for key, value in one[1].items():
        assert torch.allclose(value, other[1][key], rtol=1e-4, atol=1e-5), key
    hf_zero.convert_checkpoint(str(saved), str(tmp_path / "model"))
    model = MODELS[name].build()
    model.load_state_dict(weights)
    model.save_pretrained(tmp_path / "plain")
    files, wanted = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "plain")
    )
    assert files.keys() == wanted.keys()
    _compare(files, wanted)


def _compare(got, wanted):
    for key, value in wanted.items():
        assert torch.equal(got[key], value), key


# how a model is cut, and the keys of an engine that takes it
CUT = {
    "llama-tied": (hf_zero.tensor_parallel, {"tensor_parallel": {"autotp_size": 2}}),
    "gpt2": (hf_zero.tensor_parallel, {"tensor_parallel": {"autotp_size": 2}}),
    "mixtral": (hf_zero.expert_parallel, keys(2)),
}


@pytest.mark.parametrize("name", CUT)
def test_state_dicts_are_whole_without_an_engine(name):
    """Before one takes the model, under it and after it is destroyed."""
    whole, (cut, section) = MODELS[name].build(), CUT[name]
    given = {key: value.clone() for key, value in whole.state_dict().items()}
    more = {key: value + 1 for key, value in given.items()}
    models = [copy.deepcopy(whole) for _ in range(2)]

    def run(rank):
        model = cut(models[rank], 2)
        _compare(model.state_dict(), given)
        model.load_state_dict(more)
        _compare(model.state_dict(), more)
        engine = start(model, sgd(model), config_of(3, **section))
        _compare(whole_state_dict(engine), more)
        model.load_state_dict(given)
        _compare(model.state_dict(), given)
        engine.backward(engine(**MODELS[name].batch(0, 0, 0)).loss)
        engine.step()
        trained = whole_state_dict(engine, dtype=torch.float32)
        engine.destroy(gather=True)
        _compare(model.state_dict(), trained)
        assert any(not trained[key].equal(value) for key, value in given.items())

    run_ranks(2, run)


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, 2, 3), (4, 4, 1)), ((2, 1, 2), (4, 2, 3))],
    ids=["4 ranks from 2", "2 of 4 from no axis"],
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
    _compare(dict(hf_zero.checkpoint.iterate_state_dict(tmp_path / "t", dtype="float32")), saved)
    _compare(load_file(tmp_path / "whole.safetensors"), saved)

    def go_on(rank):
        engine = opened(*after[1:])
        engine.load_checkpoint(tmp_path, tag="t")
        loaded, trained = whole_state_dict(engine, dtype=torch.float32), train(engine, 1)
        engine.destroy()
        return loaded, trained

    for loaded, trained in run_ranks(after[0], go_on):
        _compare(loaded, saved)
        for name in saved:
            torch.testing.assert_close(trained[name], further[name], rtol=1e-5, atol=2e-5)
