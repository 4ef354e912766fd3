"""Checkpoints of ranks that share layers: resumed on other ranks and sizes, and converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hf_zero
from hf_zero.zero.access.consolidate import whole_state_dict
from tests.helpers.engines import config_of, start
from tests.helpers.ranks import run_ranks
from tests.helpers.tensor_parallel import MODELS
from tests.helpers.training import sgd

FROM, TO = ((2, 2), (2, 1), (1, 2), (4, 1)), ((1, 1), (1, 2), (2, 2), (4, 1))


def _train(
    name: str, size: int, groups: int, stage: int, steps: int, folder: Path, load: bool, save: bool
) -> Any:
    """Losses of ``steps`` steps on ``groups`` groups of ``size`` ranks, and the whole weights."""
    models = [MODELS[name].build() for _ in range(size * groups)]
    config = config_of(stage, tensor_parallel={"autotp_size": size})

    def run(rank: int) -> Any:
        engine = start(models[rank], sgd(models[rank]), config)
        if load:
            engine.load_checkpoint(str(folder))
        losses = []
        for step in range(steps):
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
    ("before", "after", "stage"),
    [
        pytest.param(before, after, stage, marks=() if place % 7 == 0 else pytest.mark.long)
        for place, (before, after, stage) in enumerate(
            (before, after, stage) for before in FROM for after in TO for stage in (1, 3)
        )
    ],
)
def test_resumed(before, after, stage, tmp_path):
    name = "llama-tied" if stage == 1 else "gpt2"
    _train(name, *before, stage, 2, tmp_path, load=False, save=True)
    one = _train(name, *before, stage, 2, tmp_path, load=True, save=False)
    other = _train(name, *after, stage, 2, tmp_path, load=True, save=False)
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    for key, value in one[1].items():
        assert torch.allclose(value, other[1][key], rtol=1e-4, atol=1e-5), key


@pytest.mark.parametrize("name", ("qwen3", "gpt2"))
def test_converted(name, tmp_path):
    _, weights = _train(name, 2, 2, 3, 1, tmp_path / "saved", load=False, save=True)
    hf_zero.convert_checkpoint(str(tmp_path / "saved"), str(tmp_path / "model"))
    files = load_file(tmp_path / "model" / "model.safetensors")
    model = MODELS[name].build()
    model.load_state_dict(weights)
    model.save_pretrained(tmp_path / "plain")
    wanted = load_file(tmp_path / "plain" / "model.safetensors")
    assert files.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(files[key], value), key


@pytest.mark.parametrize("name", ("llama-tied", "gpt2"))
def test_state_dicts_are_whole_without_an_engine(name):
    """Before one takes the model and after it is destroyed."""
    given = {key: value.clone() for key, value in MODELS[name].build().state_dict().items()}
    models = [MODELS[name].build() for _ in range(2)]

    def run(rank):
        model = hf_zero.tensor_parallel(models[rank], 2)
        _compare(model.state_dict(), given)
        model.load_state_dict({key: value + 1 for key, value in given.items()})
        _compare(model.state_dict(), {key: value + 1 for key, value in given.items()})
        model.load_state_dict(given)
        engine = start(model, sgd(model), config_of(3, tensor_parallel={"autotp_size": 2}))
        engine.backward(engine(**MODELS[name].batch(0, 0, 0)).loss)
        engine.step()
        trained = whole_state_dict(engine, dtype=torch.float32)
        engine.destroy(gather=True)
        _compare(model.state_dict(), trained)

    run_ranks(2, run)


def _compare(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for key, value in wanted.items():
        assert torch.equal(got[key], value), key
