"""The loss scale of DeepSpeed's fp16 checkpoints: after a load it moves as it would have there."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.checkpoint.foreign.deepspeed import CLASSES, scaler_of
from hf_zero.checkpoint.foreign.torch_files import load_pickle
from hf_zero.zero.reduce.losses import Fp16LossScaler
from tests.helpers.deepspeed_files import write

HYSTERESIS, WINDOW = 2, 3


@dataclass
class DynamicLossScaler:
    """DeepSpeed's rule, with its names, which the saved object has."""

    cur_scale: float = 2.0**16
    cur_iter: int = 0
    last_overflow_iter: int = -1
    cur_hysteresis: int = HYSTERESIS
    scale_window: int = WINDOW

    def update_scale(self, overflow: bool) -> None:
        if overflow:
            if self.cur_hysteresis == 1:
                self.cur_scale = max(self.cur_scale / 2, 1.0)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            stable = self.cur_iter - self.last_overflow_iter - 1
            if stable > 0 and stable % self.scale_window == 0:
                self.cur_hysteresis = HYSTERESIS
                self.cur_scale *= 2
        self.cur_iter += 1


DynamicLossScaler.__module__ = "deepspeed.runtime.fp16.loss_scaler"
DynamicLossScaler.__qualname__ = "DynamicLossScaler"


@pytest.mark.parametrize("seed", range(20))
def test_the_scale_goes_on_as_it_would_have_there(seed: int) -> None:
    draw = random.Random(seed)
    theirs = DynamicLossScaler()
    for _ in range(draw.randrange(20)):
        theirs.update_scale(draw.random() < 0.2)
    state = scaler_of({"loss_scaler": theirs})
    assert state is not None
    ours = Fp16LossScaler(1.0, True, WINDOW, HYSTERESIS)
    ours.load_state_dict(state)
    for step in range(20):
        assert ours.scale == theirs.cur_scale, step
        overflow = draw.random() < 0.2
        theirs.update_scale(overflow)
        ours.update(overflow)


def test_the_scale_of_stage_0_lies_in_the_optimizer() -> None:
    kept = asdict(DynamicLossScaler(256.0, cur_iter=7, last_overflow_iter=3))
    del kept["cur_hysteresis"]
    assert scaler_of(kept) == {"scale": 256.0, "left": 1, "since": 2}
    assert scaler_of({"cur_scale": 8.0}) == {"scale": 8.0, "left": 1, "since": -1}
    assert scaler_of({"state": {}}) is None


def test_a_file_with_the_object_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "global_step1"
    write(folder, {"weight": torch.arange(8.0).reshape(2, 4)}, stage=1)
    (tmp_path / "latest").write_text(folder.name)
    _pickle_under_its_name(monkeypatch)
    for path in folder.glob("*.pt"):
        data: dict[str, Any] = torch.load(path, weights_only=False)
        if "optim" in path.name:
            scaler = DynamicLossScaler(512.0, cur_iter=6, last_overflow_iter=2, cur_hysteresis=1)
            data["optimizer_state_dict"]["loss_scaler"] = scaler
        else:
            data["ds_config"]["fp16"] = {"enabled": True}
        torch.save(data, path)
    found = load_pickle(next(folder.glob("*optim*")), CLASSES)["optimizer_state_dict"]
    assert scaler_of(found) == {"scale": 512.0, "left": 1, "since": 2}
    model = torch.nn.Linear(4, 2, bias=False)
    engine = hf_zero.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 1},
            "fp16": {"enabled": True, "loss_scale_window": WINDOW},
        },
    )[0]
    engine.load_checkpoint(tmp_path)
    assert engine.scaler.state_dict() == {"scale": 512.0, "left": 1, "since": 2}
    engine.destroy()


def _pickle_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import ModuleType

    for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module: Any = ModuleType(DynamicLossScaler.__module__)
    module.DynamicLossScaler = DynamicLossScaler
    monkeypatch.setitem(sys.modules, DynamicLossScaler.__module__, module)
