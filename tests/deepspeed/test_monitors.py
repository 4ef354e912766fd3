"""Monitors: what the engine writes of each step, and what each of them makes of it."""

from __future__ import annotations

import csv
import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import deepspeed
import pytest
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError
from hf_zero.measures.step import FORMER
from tests.helpers.cells import in_one_item
from tests.helpers.engines import config_of
from tests.helpers.models import ROWS
from tests.helpers.stacks import on_ranks, squared
from tests.helpers.training import At, adamw

RANKS = 2
FIGURES = (
    "grad_norm step_ms samples_per_second device_bytes ram_bytes disk_bytes wire_bytes "
    "gather_wait_ms reduction_wait_ms forward_ms backward_ms update_ms"
)
NAMES = ("tensorboard", "wandb", "comet", "csv_monitor")
EVENTS = [("Train/Samples/lr", 0.5, 8), ("Train/Samples/lr", 0.25, 16)]


def rows_of(file: Path) -> list[list[str]]:
    with file.open(newline="") as opened:
        return list(csv.reader(opened))


@pytest.mark.parametrize("stage", [0, 3])
def test_figures_of_each_step_are_written_by_rank_0(stage: int, tmp_path: Path) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    losses: dict[int, list[float]] = {}

    def run(rank: int, model: Any) -> None:
        optimizer = adamw(model)
        config = config_of(
            stage, gradient_accumulation_steps=2, csv_monitor=section, wall_clock_breakdown=True
        )
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        assert engine.monitor.enabled and engine.monitor.writes == (rank == 0)
        for step in range(2):
            for micro in range(2):
                loss = squared(engine, At(step, micro, rank))
                losses.setdefault(rank, []).append(float(loss.detach()))
                engine.backward(loss)
                engine.step()
        engine.destroy()

    on_ranks(RANKS, run)
    samples = [str(2 * ROWS * RANKS), str(4 * ROWS * RANKS)]
    files = {file.name: rows_of(file) for file in (tmp_path / "job").iterdir()}
    head, *rows = files["Train_Samples_train_loss.csv"]
    assert head == ["step", "train_loss"] and [at for at, _ in rows] == samples
    every = [sum(each) / RANKS for each in zip(losses[0], losses[1])]
    means = [sum(every[:2]) / 2, sum(every[2:]) / 2]
    assert [float(value) for _, value in rows] == pytest.approx(means, rel=1e-6)
    assert [at for at, _ in files["Train_Samples_lr.csv"][1:]] == samples
    sent = ("all_gather", "reduce_scatter", "all_reduce") if stage else ("all_reduce",)
    wire = [f"{operation}_wire_bytes" for operation in sent]
    names = (*FIGURES.split(), *FORMER, *FORMER.values(), *wire)
    assert set(files) == {f"Train_Samples_{name}.csv" for name in names}
    assert files["Train_Samples_loss.csv"][1:] == rows


def test_a_file_is_gone_on_with(tmp_path: Path) -> None:
    section = deepspeed.monitor.config.CSVConfig(True, str(tmp_path), "job")
    for event in EVENTS:
        deepspeed.monitor.csv_monitor.csvMonitor(section).write_events([event])
    rows = rows_of(tmp_path / "job" / "Train_Samples_lr.csv")
    assert rows == [["step", "lr"], ["8", "0.5"], ["16", "0.25"]]


def test_services_are_told_by_their_own_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[tuple[Any, ...]] = []

    def teller(name: str) -> Any:
        return lambda *args, **kwargs: told.append((name, *args, kwargs))

    experiment = SimpleNamespace(set_name=teller("name"), log_metric=teller("metric"))
    stand_ins: dict[str, dict[str, Any]] = {
        "tensorboard": {},
        "torch.utils.tensorboard": {
            "SummaryWriter": lambda log_dir: SimpleNamespace(
                add_scalar=teller(log_dir), flush=teller("flush")
            )
        },
        "wandb": {"init": teller("init"), "log": teller("log")},
        "comet_ml": {"start": lambda **given: told.append(("start", given)) or experiment},
    }
    for name, content in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    config = {
        "train_batch_size": 2,
        "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "job"},
        "wandb": {"enabled": True, "team": "us"},
        "comet": {"enabled": True, "samples_log_interval": 16, "experiment_name": "it"},
        "csv_monitor": {"output_path": str(tmp_path)},
    }
    sections = deepspeed.DeepSpeedConfig(config).monitor_config
    master = deepspeed.monitor.monitor.MonitorMaster(sections)
    assert told.pop(0) == ("init", {"project": "deepspeed", "group": None, "entity": "us"})
    started = dict.fromkeys(("api_key", "project", "workspace", "experiment_key", "mode", "online"))
    assert told.pop(0) == ("start", started) and told.pop(0) == ("name", "it", {})
    master.write_events(EVENTS)
    assert told == [
        ("logs/job", "Train/Samples/lr", 0.5, 8, {}),
        ("logs/job", "Train/Samples/lr", 0.25, 16, {}),
        ("flush", {}),
        ("log", {"Train/Samples/lr": 0.5}, {"step": 8, "commit": None}),
        ("log", {"Train/Samples/lr": 0.25}, {"step": 16, "commit": None}),
        ("metric", "Train/Samples/lr", 0.5, {"step": 8}),  # the next would be 16 samples later
    ]
    assert not list(tmp_path.iterdir())


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorboard", "wandb", "comet"):
        monkeypatch.setitem(sys.modules, {"comet": "comet_ml"}.get(name, name), None)
        config = {"train_batch_size": 1, name: {"enabled": True}}
        with pytest.raises(ConfigError, match=f"the monitor {name} is enabled and its package"):
            deepspeed.initialize(model=nn.Linear(2, 2), config=config)


@in_one_item(NAMES)
def test_sections_have_the_defaults_of_deepspeed(name: str) -> None:
    sections = deepspeed.monitor.config.DeepSpeedMonitorConfig()
    written = deepspeed.DeepSpeedConfig({"train_batch_size": 1, name: {}}).monitor_config
    assert written == sections and not sections.enabled
    given = deepspeed.monitor.config.get_monitor_config({name: {"enabled": True}, "odd": 1})
    assert given.enabled and getattr(given, name).enabled
    module = importlib.import_module(f"deepspeed.monitor.{name}")
    kinds = {"wandb": "WandbMonitor", "comet": "CometMonitor", "csv_monitor": "csvMonitor"}
    monitor = getattr(module, kinds.get(name, "TensorBoardMonitor"))(getattr(sections, name))
    monitor.write_events(EVENTS)  # it is off
    assert not monitor.enabled and monitor.monitor_config == getattr(sections, name)


def test_the_key_of_an_account_is_not_logged() -> None:
    config = ZeroConfig.from_dict({"comet": {"enabled": True, "api_key": "secret", "project": "x"}})
    assert config.comet.api_key == "secret"
    shown = {row.key: row.value for row in config.explain()}
    assert (shown["comet.api_key"], shown["comet.project"]) == ("***", "x")
    assert "secret" not in config.describe() and "secret" not in repr(config)
