"""What scripts that end by themselves save and evaluate, beside the same over untouched torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.engine import Engine
from hf_zero.parity.answers import Answer
from hf_zero.parity.saved_models import SavedModel, tensor_differences
from tests.helpers.ranks import run_ranks
from tests.parity.loops import FEATURES, ROWS, config, stack


def answer(
    settings: dict, folder: Path, at_end: Callable[[Any], None] = lambda engine: None
) -> Answer:
    """The answer about a loop on two ranks that evaluates, calls ``at_end`` and saves."""
    model = stack()

    def train() -> None:
        engine, *_ = hf_zero.initialize(model=copy.deepcopy(model), config=settings)
        generator = torch.Generator().manual_seed(engine.global_rank)
        dtype = torch.bfloat16 if engine.config.precision == "bf16" else torch.float32
        for step in range(4):
            batch = torch.randn(ROWS, FEATURES, generator=generator).to(dtype)
            engine.backward(engine(batch).float().square().mean())
            engine.step()
            if step in (1, 3):
                with torch.no_grad():
                    engine(batch if step == 1 else batch * engine.scale_of_evaluation)
        at_end(engine)
        engine.save_checkpoint(folder)
        engine.save_16bit_model(folder / "model")

    def on_rank(rank: int) -> Answer:
        return hf_zero.parity(train, steps=0)

    return run_ranks(2, on_rank)[0]


@pytest.fixture(autouse=True)
def same_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Module, "scale_of_evaluation", 1, raising=False)


@pytest.mark.parametrize(("stage", "precision"), [(3, "fp32"), (2, "bf16")])
def test_what_a_right_script_saves_is_equal(stage: int, precision: str, tmp_path: Path) -> None:
    result = answer(config(stage, precision), tmp_path / "runs")
    assert result.equal, str(result)
    assert result.outcome.saved == 2
    assert str(result).partition("\n")[0].endswith(", 2 saved models")
    assert "evaluation" in result.outcome.largest
    assert not (tmp_path / "runs").exists()


def halves_a_row(engine: Any) -> None:
    if isinstance(engine, Engine):
        parameter = engine.module[3].bias
        with hf_zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            parameter[0] *= 0.5
            parameter[0] += 0.1


def test_a_saved_weight_that_differs_is_named_by_its_file(tmp_path: Path) -> None:
    result = answer(config(3), tmp_path / "runs", halves_a_row)
    first = result.outcome.first
    assert first is not None, str(result)
    assert (first.what, first.parameter, first.step) == ("saved weights", "3.bias", 4)
    assert first.file in ("model", "runs/global_step4")
    said = f"different from torch at step 4: saved weights of 3.bias in {first.file} off by"
    assert said in str(result)


def test_an_evaluation_that_differs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "scale_of_evaluation", 2, raising=False)
    result = answer(config(1), tmp_path / "runs")
    first = result.outcome.first
    assert first is not None, str(result)
    assert (first.what, first.step, first.rank) == ("evaluation", 4, 0), str(result)


def test_one_name_of_tied_weights_is_enough() -> None:
    first = torch.randn(30, 40)
    rounded = first * (1 + 1e-3)
    nothing: Any = SimpleNamespace(masters=lambda *key: {})
    want = {"a": first, "tied": first, "other": torch.randn(9)}
    for without, lost in (("tied", []), ("other", ["other"])):
        got = {name: rounded if name == "a" else want[name] for name in want if name != without}
        noise = SavedModel(iter({**want, "a": first * (1 + 2e-3)}.items()))
        models = (SavedModel(iter(of.items())) for of in (want, got))
        found = tensor_differences(*models, noise, nothing, mixed=True)
        assert [of[0] for of in found] == lost


def saves_nothing(engine: Any) -> None:
    if isinstance(engine, Engine):
        engine.save_16bit_model = lambda folder: True


def test_a_model_that_is_not_saved_is_named(tmp_path: Path) -> None:
    result = answer(config(1), tmp_path / "runs", saves_nothing)
    said = "different from torch at step 4: the model in model is not saved, and is with torch"
    assert said in str(result), str(result)
