"""The figures of a step by each route: one set of names in the trackers of Accelerate, the Trainer
and Lightning, and in the file beside the checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.tracking import GeneralTracker
from torch.utils.data import DataLoader

import hf_zero
from hf_zero.measures.figures import tracked
from hf_zero.measures.metrics_file import read_metrics, read_rows
from tests.helpers.plain_process import forget
from tests.helpers.trainers import EVERY_STEP, STEPS, options, rows, trainer
from tests.integrations.accelerate.test_loop import accelerator_with, loader, small
from tests.integrations.lightning.test_config_keys import module_of

pytestmark = pytest.mark.usefixtures("plain_process")

ON = {"zero_optimization": {"stage": 3}, "metrics": {"enabled": True}}
NAMES = {
    "learning_rate", "grad_norm", "step_ms", "samples_per_second", "device_bytes",
    "ram_bytes", "disk_bytes", "wire_bytes", "gather_wait_ms", "reduction_wait_ms",
    "tokens_per_second", "loss",
}  # fmt: skip


def of_the_trainer(folder: Path) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []

    class Tracker(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            seen.extend([dict(logs)] if "loss" in logs else [])

    args = hf_zero.TrainingArguments(**options(folder, **EVERY_STEP), zero_config=ON)
    run = trainer(args, callbacks=[Tracker()])
    run.train()
    assert all(row.keys() >= NAMES for row in run.state.log_history if "loss" in row)
    return seen


def of_accelerate(folder: Path) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []

    class Tracker(GeneralTracker):
        name, requires_logging_directory = "seen", False

        def __init__(self) -> None:
            super().__init__()

        @property
        def tracker(self) -> None:
            return None

        def store_init_configuration(self, values: Any) -> None: ...

        def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
            seen.append(values)

    accelerator = accelerator_with(dict(ON), log_with=[Tracker()])
    accelerator.init_trackers("run")
    model = small()
    model, optimizer, data = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader(STEPS)
    )
    for number, batch in enumerate(data):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": -1.0}, step=number)
        if number == 1:
            accelerator.save_state(str(folder / "state"))
    assert [values["loss"] for values in seen] == [-1.0] * STEPS  # the script's own
    return seen


def of_lightning(folder: Path) -> list[dict[str, Any]]:
    pl = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.loggers.logger import DummyLogger

    from hf_zero.integrations.lightning import ZeroStrategy

    seen: list[dict[str, Any]] = []

    class Tracker(DummyLogger):  # type: ignore[misc]
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            seen.extend([dict(metrics)] if "step_ms" in metrics else [])

    fit = pl.Trainer(
        accelerator="cpu", devices=1, strategy=ZeroStrategy(config=ON), max_steps=STEPS,
        logger=Tracker(), log_every_n_steps=1, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, default_root_dir=str(folder),
    )  # fmt: skip
    fit.fit(module_of("bert"), DataLoader(rows("bert"), batch_size=4))
    fit.strategy.engine.destroy()
    return seen


ROUTES = {"trainer": of_the_trainer, "accelerate": of_accelerate, "lightning": of_lightning}


@pytest.mark.parametrize("route", ROUTES)
def test_trackers_and_the_file_have_the_same_names(route: str, tmp_path: Path) -> None:
    seen = ROUTES[route](tmp_path)
    kept = list(read_metrics(tmp_path))
    (header,) = [row["run"] for row in read_rows(tmp_path) if "run" in row]
    keys = {row["key"]: row["source"] for row in header["config"]}
    assert keys["metrics.enabled"] != "default" and header["stage"] == 3 and header["parameters"]
    assert [row["step"] for row in kept] == [*range(1, STEPS + 1)]
    assert all(tracked(row).keys() == NAMES for row in kept), set(kept[0]) ^ NAMES
    assert len(seen) == STEPS and all(row.keys() >= NAMES for row in seen)
    own = NAMES - {"loss", "learning_rate", "grad_norm"}  # which the Trainer has itself
    assert [{name: row[name] for name in own} for row in seen] == [
        {name: row[name] for name in own} for row in kept
    ]


def test_a_resumed_trainer_continues_one_curve(tmp_path: Path) -> None:
    given = options(tmp_path, **EVERY_STEP, save_total_limit=2)
    args = hf_zero.TrainingArguments(**given, zero_config=ON)
    trainer(args).train()
    forget()
    again = trainer(hf_zero.TrainingArguments(**given, zero_config=ON))
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS - 1}"))
    assert [row["step"] for row in read_metrics(tmp_path)] == [*range(1, STEPS + 1)]
