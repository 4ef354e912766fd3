"""Trainings of small transformers on threaded ranks that are saved and resumed, by their setup."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.checkpoint import background_saves
from tests.helpers.engines import start
from tests.helpers.models import ARCHITECTURES, ROWS
from tests.helpers.offloads import offload
from tests.helpers.ranks import run_ranks
from tests.helpers.training import adamw

WINDOW = 4  # micro-batches of one global batch, whatever the ranks


@dataclass(frozen=True)
class Setup:
    """``way`` "" keeps everything on the device; ``folder`` is where files go."""

    ranks: int = 2
    stage: int = 3
    precision: str = "fp32"
    model: str = "gpt2"
    optimizer: Any = adamw
    frozen: str = "nothing"
    way: str = ""
    moments: str = "fp32"
    folder: Path = Path()

    @property
    def config(self) -> dict[str, Any]:
        schedule = {"warmup_num_steps": 3, "total_num_steps": 20, "warmup_max_lr": 1e-2}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": WINDOW // self.ranks,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": self.stage},
            "scheduler": {"type": "WarmupDecayLR", "params": schedule},
        }
        if self.way:
            section = offload(self.way, self.stage, self.folder, moments=self.moments)
            config["zero_optimization"] = section
        if self.precision == "bf16":
            config["bf16"] = {"enabled": True}
        if self.precision == "fp16":
            # the scale starts too high and grows every second step: overflows and growth on both
            # sides of the save
            scale = {"initial_scale_power": 17, "loss_scale_window": 2, "hysteresis": 1}
            config["fp16"] = {"enabled": True, **scale}
        return config

    def models(self) -> list[torch.nn.Module]:
        models = [ARCHITECTURES[self.model].build() for _ in range(self.ranks)]
        for model in models:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(self.frozen not in name)
        return models

    def open(self, model: torch.nn.Module) -> Any:
        return start(model, self.optimizer(model), self.config)

    def run(self, action: Callable[[Any, int], Any]) -> list[Any]:
        """``action(engine, rank)`` on each rank, with an engine that ends after it."""
        models = self.models()

        def on_rank(rank: int) -> Any:
            engine = self.open(models[rank])
            result = action(engine, rank)
            engine.destroy()
            return result

        return run_ranks(self.ranks, on_rank)

    def at(self, tmp_path: Path) -> Any:
        """This setup with its files in a folder of ``tmp_path``."""
        (tmp_path / "disk").mkdir(exist_ok=True)
        return dataclasses.replace(self, folder=tmp_path / "disk")


def described(setup: Setup) -> str:
    """The fields of ``setup`` that are not the default."""
    fields = dataclasses.fields(setup)
    more = [f for f in fields[2:] if f.name != "folder" and getattr(setup, f.name) != f.default]
    told = [getattr(setup, f.name) for f in more]
    words = [
        f.name if each is True else getattr(each, "__name__", each) for f, each in zip(more, told)
    ]
    return f"{setup.ranks}x{setup.stage} {' '.join(map(str, words))}".strip()


def train(engine: Any, rank: int, steps: range, model: str = "gpt2") -> list[float]:
    """Losses of this rank's micro-batches. Which ones a window has does not depend on the ranks."""
    losses = []
    each = WINDOW // engine.world_size
    for step in steps:
        for micro in range(each):
            loss = engine(**ARCHITECTURES[model].batch(step, rank * each + micro, 0)).loss
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
    return losses


COUNTERS = ("global_steps", "skipped_steps", "global_samples")


def place(engine: Any) -> dict[str, Any]:
    """All that is one number for all ranks."""
    return {
        "counters": [getattr(engine.counters, name) for name in COUNTERS],
        "scaler": engine.scaler.state_dict() if engine.config.precision == "fp16" else None,
        "lr": sorted(engine.get_lr()),
        "schedule": engine.lr_scheduler.last_epoch,
    }


def state(engine: Any) -> dict[str, torch.Tensor]:
    """Whole masters and moments, on the CPU. Collective."""
    kept = {}
    for name, p in engine.module.named_parameters():
        if p.requires_grad:
            kept[name] = hf_zero.safe_get_full_fp32_param(p).cpu().clone()
            for kind in ("exp_avg", "exp_avg_sq"):
                found = hf_zero.safe_get_full_optimizer_state(p, kind)
                kept[f"{name} {kind}"] = found.cpu().clone()
    return kept


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Threads that write a save do it once this is set."""
    free, write = threading.Event(), background_saves.write_image

    def waiting(path: Path, *rest: Any) -> Any:
        assert free.wait(60)
        return write(path, *rest)

    monkeypatch.setattr(background_saves, "write_image", waiting)
    yield free
    free.set()
