"""The keys ``checkpoint.memory`` reach the engine by every route."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import yaml
from accelerate import Accelerator

import hf_zero
from hf_zero.config.sections import MemorySection
from tests.helpers.trainers import ROUTES, routed
from tests.integrations.accelerate.test_loop import small

pytestmark = [pytest.mark.usefixtures("plain_process"), pytest.mark.filterwarnings("ignore")]

Config = dict[str, Any]


def by_initialize(config: Config, folder: Path, setenv: Callable[[str, str], None]) -> Any:
    return hf_zero.initialize(model=torch.nn.Linear(2, 2), config=config)[0]


def by_json(config: Config, folder: Path, setenv: Callable[[str, str], None]) -> Any:
    file = folder / "zero.json"
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, **config}))
    return deepspeed.initialize(model=torch.nn.Linear(2, 2), config=str(file))[0]


def by_yaml(config: Config, folder: Path, setenv: Callable[[str, str], None]) -> Any:
    """As ``accelerate launch --config`` hands the file on to a rank."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    section = {"zero_stage": 2, "gradient_clipping": 1.0, "checkpoint": config["checkpoint"]}
    file = folder / "zero.yaml"
    top = {"distributed_type": "DEEPSPEED", "num_processes": 1, "use_cpu": True}
    file.write_text(yaml.safe_dump({**top, "deepspeed_config": section}))
    args = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    args, defaults, _ = _validate_launch_command(args)
    args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    _, environment = prepare_deepspeed_cmd_env(args)
    for name, value in environment.items():
        setenv(name, value)
    model = small()
    return Accelerator(cpu=True).prepare(model, torch.optim.AdamW(model.parameters()))[0]


def by_lightning(config: Config, folder: Path, setenv: Callable[[str, str], None]) -> Any:
    import lightning.pytorch as pl

    from hf_zero.integrations.lightning.lightning_pytorch import ZeroStrategy
    from tests.integrations.lightning.test_checkpoints import Net

    strategy = ZeroStrategy(config)
    pl.Trainer(
        strategy=strategy, devices=1, accelerator="cpu", max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(Net())  # fmt: skip
    return strategy.engine


def by_trainer(route: str) -> Callable[..., Any]:
    def train(config: Config, folder: Path, setenv: Callable[[str, str], None]) -> Any:
        run = routed(route, 2, folder, config=config, max_steps=1)
        run.train()
        return run.deepspeed

    return train


BY = {
    "initialize": by_initialize, "DeepSpeed's JSON": by_json, "Accelerate's YAML": by_yaml,
    "Lightning": by_lightning, **{f"Trainer, {route}": by_trainer(route) for route in ROUTES},
}  # fmt: skip


@pytest.mark.parametrize("route", BY)
def test_the_keys_reach_the_engine(
    route: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = {
        "every": 7, "copies": 3, "limit": "1GiB", "folder": str(tmp_path / "memory"), "job": "mine",
    }  # fmt: skip
    config = {"zero_optimization": {"stage": 2}, "checkpoint": {"memory": memory}}
    engine = BY[route](config, tmp_path, monkeypatch.setenv)
    assert engine.config.memory_checkpoints == MemorySection(
        7, 3, 1 << 30, str(tmp_path / "memory"), "mine"
    )
    of_script = route in ("initialize", "DeepSpeed's JSON")
    assert engine.memory.every == 7 and engine.memory.by_route is not of_script
