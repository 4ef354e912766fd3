"""Monitors and profiles: what the engine writes of each step, what each monitor makes of it, and
the operations of a forward beside those that its shapes say.
"""

from __future__ import annotations

import csv
import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError
from hf_zero.measures.step import FORMER
from tests.helpers.engines import config_of
from tests.helpers.models import ROWS
from tests.helpers.stacks import on_ranks, squared
from tests.helpers.training import At, adamw

RANKS = 2
FIGURES = (
    "grad_norm step_ms samples_per_second device_bytes ram_bytes disk_bytes wire_bytes "
    "gather_wait_ms reduction_wait_ms forward_ms backward_ms update_ms"
)
EVENTS = [("Train/Samples/lr", 0.5, 8), ("Train/Samples/lr", 0.25, 16)]


def rows_of(file: Path) -> list[list[str]]:
    with file.open(newline="") as opened:
        return list(csv.reader(opened))


def test_figures_of_each_step_are_written_by_rank_0(tmp_path: Path) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    losses: dict[int, list[float]] = {}

    def run(rank: int, model: Any) -> None:
        optimizer = adamw(model)
        more = {"csv_monitor": section, "wall_clock_breakdown": True}
        config = config_of(3, gradient_accumulation_steps=2, **more)
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
    sent = ("all_gather", "reduce_scatter", "all_reduce")
    wire = [f"{operation}_wire_bytes" for operation in sent]
    names = (*FIGURES.split(), *FORMER, *FORMER.values(), *wire)
    assert set(files) == {f"Train_Samples_{name}.csv" for name in names}
    assert files["Train_Samples_loss.csv"][1:] == rows


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
    told.clear()
    master.write_events([("Train/Samples/lr", 0.5, 4), *EVENTS])  # an earlier checkpoint was loaded
    metrics = [each for each in told if each[0] == "metric"]
    assert metrics == [("metric", "Train/Samples/lr", 0.5, {"step": 4})]


def test_sections_and_monitors_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the defaults of DeepSpeed; a file is gone on with; a package may be missing."""
    kinds = {"wandb": "WandbMonitor", "comet": "CometMonitor", "csv_monitor": "csvMonitor"}
    sections = deepspeed.monitor.config.DeepSpeedMonitorConfig()
    for name in ("tensorboard", "wandb", "comet", "csv_monitor"):
        written = deepspeed.DeepSpeedConfig({"train_batch_size": 1, name: {}}).monitor_config
        assert written == sections and not sections.enabled
        given = deepspeed.monitor.config.get_monitor_config({name: {"enabled": True}, "odd": 1})
        assert given.enabled and getattr(given, name).enabled
        module = importlib.import_module(f"deepspeed.monitor.{name}")
        monitor = getattr(module, kinds.get(name, "TensorBoardMonitor"))(getattr(sections, name))
        monitor.write_events(EVENTS)  # it is off
        assert not monitor.enabled and monitor.monitor_config == getattr(sections, name)
        if name != "csv_monitor":
            monkeypatch.setitem(sys.modules, {"comet": "comet_ml"}.get(name, name), None)
            config = {"train_batch_size": 1, name: {"enabled": True}}
            with pytest.raises(ConfigError, match=f"the monitor {name} is enabled and its package"):
                deepspeed.initialize(model=nn.Linear(2, 2), config=config)
    section = deepspeed.monitor.config.CSVConfig(True, str(tmp_path), "job")
    for event in EVENTS:
        deepspeed.monitor.csv_monitor.csvMonitor(section).write_events([event])
    rows = rows_of(tmp_path / "job" / "Train_Samples_lr.csv")
    assert rows == [["step", "lr"], ["8", "0.5"], ["16", "0.25"]]


def test_a_mode_that_comet_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"comet\.mode = 'resume' .* one of 'get_or_create'"):
        ZeroConfig.from_dict({"comet": {"enabled": True, "mode": "resume"}})


def test_the_key_of_an_account_is_not_logged() -> None:
    config = ZeroConfig.from_dict({"comet": {"enabled": True, "api_key": "secret", "project": "x"}})
    assert config.comet.api_key == "secret"
    shown = {row.key: row.value for row in config.explain()}
    assert (shown["comet.api_key"], shown["comet.project"]) == ("***", "x")
    assert "secret" not in config.describe() and "secret" not in repr(config)


profiling: Any = deepspeed.profiling.flops_profiler
BATCH = 3


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 6 * 6, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(torch.relu(self.conv(x)))
        return found


CONV, HEAD = 2 * BATCH * 6 * 6 * 4 * 2 * 9, 2 * BATCH * 4 * 6 * 6 * 5
PARAMS = 4 * 2 * 9 + 4 + 4 * 6 * 6 * 5 + 5


def test_a_models_profile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shape = (BATCH, 2, 8, 8)
    found = profiling.get_model_profile(Two(), shape, as_string=False)
    assert found == (CONV + HEAD, (CONV + HEAD) // 2, PARAMS)
    text = capsys.readouterr().out
    assert "conv: 15.55 Kflops, 78.3%" in text and "  head: 4.32 Kflops, 21.7%" in text
    profiling.get_model_profile(Two(), shape, detailed=False)
    assert "conv" not in capsys.readouterr().out
    profiling.FlopsProfiler(Two()).print_model_profile()  # none was begun
    file = tmp_path / "made" / "profile.txt"
    found = profiling.get_model_profile(
        Two(), args=[torch.ones(shape)], ignore_modules=[nn.Linear], output_file=str(file)
    )
    assert found == ("15.55 K", "7.78 KMACs", "801") and PARAMS == 801
    assert "fwd MACs per GPU" in file.read_text() and not capsys.readouterr().out
    for mode, how in (("forward", "needs input_shape"), ("backward", "neither 'forward' nor")):
        with pytest.raises(ValueError, match=how):
            profiling.get_model_profile(Two(), mode=mode)
    model, lone = Two(), torch.ones(shape)
    with pytest.raises(ConfigError, match="Two"):
        profiling.get_model_profile(model, args=lone, mode="generate")
    assert model.training
    found = profiling.get_model_profile(model, args=lone, print_profile=False, as_string=False)
    assert found[0] == CONV + HEAD
    assert profiling.number_to_string(1.234e9) == "1.23 G" and profiling.number_to_string(0) == "0 "
    assert profiling.number_to_string(-1500) == "-1.5 K"
    assert profiling.flops_to_string(2e12, "G") == "2000 GFLOPS"
    assert profiling.macs_to_string(1500) == "1.5 KMACs"
    assert profiling.params_to_string(7e9) == profiling.params_to_string(7e9, "B") == "7 B"
    assert profiling.duration_to_string(0.0125) == "12.5 ms"


def test_a_configuration_profiles_one_step(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Into a file, or printed."""
    file = tmp_path / "profile.txt"
    section = {"enabled": True, "step": 2, "output_file": str(file), "module_depth": 1}
    shown = {"enabled": True, "profile_step": 0, "module_depth": 1, "top_modules": 1}

    def started(model: Any, section: dict[str, Any]) -> Any:
        config = config_of(3, gradient_accumulation_steps=2, flops_profiler=section)
        return deepspeed.initialize(model=model, optimizer=adamw(model), config=config)[0]

    def step(engine: Any) -> None:
        for _ in range(2):
            engine.backward(engine(torch.ones(BATCH, 2, 8, 8)).sum())
            engine.step()

    def run(rank: int, model: Any) -> None:
        engine = started(model, section)
        for number in range(4):
            step(engine)
            assert file.exists() == (number == 2)
            file.unlink(missing_ok=True)
        assert engine.flops_profiler.flops == CONV + HEAD
        assert engine.flops_profiler.params == PARAMS
        engine.destroy()
        engine = started(model, shown)
        step(engine), step(engine)
        engine.destroy()

    on_ranks(1, run, build=Two)
    printed = capsys.readouterr().out.splitlines()
    heads = [line for line in printed if line.startswith("Profile Summary")]
    assert heads == ["Profile Summary at step 0:"]
    assert "depth 1: Conv2d 15.55 Kflops" in printed
    names = [line.split(":")[0].strip() for line in printed if line.endswith("%")]
    assert names == ["Two", "conv", "head"]
