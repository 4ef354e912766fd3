"""``hf_zero.TrainingArguments``: how a config is read, what the other arguments fill in, what
contradicts them.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import HfArgumentParser
from transformers.integrations import deepspeed as theirs

import hf_zero
from hf_zero.config.launched import LAUNCH_FILE
from hf_zero.errors import ConfigError, HfZeroError
from hf_zero.integrations import finder
from hf_zero.integrations.transformers.trainer_config import open_left_out, read
from hf_zero.integrations.transformers.training_arguments import (
    TrainingArguments,
    require_answering_imports,
)

Make = Callable[..., TrainingArguments]
STAGE_2 = {"zero_optimization": {"stage": 2}}


@pytest.fixture
def common(tmp_path: Path) -> dict[str, Any]:
    return {"output_dir": str(tmp_path), "report_to": "none", "use_cpu": True}


@pytest.fixture
def make(common: dict[str, Any]) -> Make:
    return lambda zero_config=None, **changes: TrainingArguments(
        **{**common, **changes}, zero_config=zero_config
    )


def live(args: Any) -> dict[str, Any]:
    """Return the config that the engine will see."""
    return args.deepspeed_plugin.hf_ds_config.config


def test_every_form_of_a_config(make: Make, tmp_path: Path) -> None:
    """A file of Accelerate may force the CPU."""
    (tmp_path / "zero.json").write_text(json.dumps(STAGE_2))
    yaml = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n"
    (tmp_path / "zero.yaml").write_text(yaml)
    files = [str(tmp_path / "zero.json"), str(tmp_path / "zero.yaml"), tmp_path / "zero.json"]
    given = [hf_zero.ZeroConfig(stage=2), STAGE_2, {"stage": 2}, json.dumps(STAGE_2), "zero2"]
    for form in (*files, *given):
        args = make(form)
        assert args.deepspeed == STAGE_2, form
        assert live(args)["zero_optimization"]["stage"] == args.deepspeed_plugin.zero_stage == 2
    (tmp_path / "zero.yaml").write_text(f"use_cpu: true\nmixed_precision: bf16\n{yaml}")
    args = make(str(tmp_path / "zero.yaml"), use_cpu=False)
    assert args.use_cpu and args.device.type == "cpu"
    assert live(args)["bf16"]["enabled"] is True


def test_without_a_config_it_is_the_stock_class(make: Make, common: dict[str, Any]) -> None:
    """And making arguments leaves no switch behind."""
    assert hf_zero.TrainingArguments is TrainingArguments
    assert issubclass(TrainingArguments, transformers.TrainingArguments)
    make("zero3", use_cpu=False)
    assert "ACCELERATE_USE_DEEPSPEED" not in os.environ
    ours, stock = make(), transformers.TrainingArguments(**common)
    assert ours.deepspeed is None and ours.deepspeed_plugin is None
    assert {**ours.to_dict(), "zero_config": None} == {**stock.to_dict(), "zero_config": None}


def test_what_the_config_leaves_out_comes_from_the_arguments(make: Make) -> None:
    config = {"stage": 1, "optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupDecayLR"}}
    sizes = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    rates = {"max_grad_norm": 0.25, "learning_rate": 2e-4, "weight_decay": 0.1}
    args = make(config, **sizes, **rates, bf16=True)
    found = live(args)
    assert found["train_micro_batch_size_per_gpu"] == 3
    assert found["gradient_accumulation_steps"] == 2
    assert (found["train_batch_size"], found["gradient_clipping"]) == (6, 0.25)
    assert found["bf16"]["enabled"] is True and found["fp16"]["enabled"] is False
    adam = {"lr": 2e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
    assert found["optimizer"]["params"] == adam
    rates = {"warmup_min_lr": 0, "warmup_max_lr": 2e-4}
    steps = dict.fromkeys(("warmup_num_steps", "total_num_steps"), "auto")
    assert found["scheduler"]["params"] == rates | steps
    assert args.deepspeed_plugin.hf_ds_config.dtype().itemsize == 2


def test_stock_arguments_with_the_same_config_mean_the_same(
    make: Make, common: dict[str, Any]
) -> None:
    """ "auto" means left out; a choice not to gather weights is kept."""

    def config() -> dict[str, Any]:
        sgd = {"type": "SGD", "params": {"momentum": 0.9}}
        return {"zero_optimization": {"stage": 3}, "optimizer": sgd}

    given = config()
    stock = transformers.TrainingArguments(**common, deepspeed=given)
    ours = make(given)
    assert live(ours) == live(stock) and ours == make(deepspeed=given)
    assert live(ours)["optimizer"]["params"] == {"momentum": 0.9, "lr": 5e-5, "weight_decay": 0.0}
    assert live(ours)["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True
    open_left_out(read(given))
    assert given == config()
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping")
    autos = {**dict.fromkeys(sizes, "auto"), "bf16": {"enabled": "auto"}}
    assert live(make({"stage": 2, **autos})) == live(make("zero2"))
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}
    opened: dict[str, Any] = {"zero_optimization": {**zero}}
    open_left_out(opened)
    assert opened["zero_optimization"] == zero


# Keys of the configuration, arguments, and what is said of both.
CONTRADICTIONS: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    (
        {"train_micro_batch_size_per_gpu": 4},
        {"per_device_train_batch_size": 2},
        ("=4", "=2", "per_device_train_batch_size"),
    ),
    ({"train_batch_size": 16}, {}, ("=16", "=8", "train_batch_size")),
    ({"gradient_accumulation_steps": 4}, {}, ("=4", "=1", "gradient_accumulation_steps")),
    ({"gradient_clipping": 0.5}, {}, ("=0.5", "=1.0", "max_grad_norm")),
    ({"bf16": {"enabled": True}}, {"fp16": True}, ("bf16", "fp16")),
    ({"bf16": {"enabled": False}}, {"bf16": True}, ("bf16.enabled=False", "=True")),
    (
        {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}},
        {},
        ("=0.1", "=5e-05", "learning_rate"),
    ),
]


def test_a_contradiction_shows_both_values(make: Make) -> None:
    for config, changes, values in CONTRADICTIONS:
        with pytest.raises(ConfigError, match="contradicts the training arguments") as raised:
            make({"stage": 2, **config}, **changes)
        assert all(value in str(raised.value) for value in values), config
    with pytest.raises(ConfigError, match="contradicts zero_config"):
        make("zero2", deepspeed={"zero_optimization": {"stage": 3}})
    with pytest.raises(ConfigError, match=r"fsdp='full_shard' and zero_config.*hf-zero migrate"):
        make("zero2", fsdp="full_shard")
    # a precision in the config alone is none
    args = make({"stage": 2, "bf16": {"enabled": True}}, use_cpu=False)
    assert args.deepspeed_plugin.hf_ds_config.dtype().itemsize == 2
    assert live(args)["bf16"]["enabled"] is True


def test_json_the_command_line_and_a_config_that_cannot_be_used(make: Make, tmp_path: Path) -> None:
    for form in ("zero3", {"stage": 3, "gradient_clipping": 1.0}):
        args = make(form)
        # written as <HUB_TOKEN>
        back = TrainingArguments(**{**json.loads(args.to_json_string()), "hub_token": None})
        assert back == args and live(back) == live(args)
        assert dataclasses.replace(args, learning_rate=1e-2).learning_rate == 1e-2
        assert type(args).__name__ in repr(args)
    args = make(hf_zero.ZeroConfig(stage=1, bf16=True), bf16=True)
    written = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
    assert json.loads(args.to_json_string())["zero_config"] == written
    common = ["--output_dir", str(tmp_path), "--report_to", "none", "--use_cpu"]
    parse = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses
    for text in ("zero2", json.dumps(STAGE_2)):
        (args,) = parse([*common, "--zero_config", text])
        assert live(args)["zero_optimization"]["stage"] == 2
    (args,) = parse(common)
    assert args.zero_config is None and args.deepspeed_plugin is None
    unusable: list[tuple[Any, str]] = [({"stag": 2}, "stag"), ("zero7", "zero7"), (7, "int")]
    for config, what in [*unusable, ({"stage": 9}, "9")]:
        with pytest.raises(HfZeroError, match=what):
            make(config)


def test_a_launcher_with_another_stage_or_with_settings_of_its_own(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused in our words: Accelerate's name its plugin, and neither the argument nor the file."""
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    file = tmp_path / "zero.json"
    file.write_text('{"zero_optimization": {"stage": 3}}')
    both = r"asks for stage 2, and `accelerate launch.*` for stage 3"
    for name, value in (("ZERO_STAGE", "3"), ("CONFIG_FILE", str(file))):
        with monkeypatch.context() as patch:
            patch.setenv(f"ACCELERATE_DEEPSPEED_{name}", value)
            assert make("zero3").deepspeed_plugin.zero_stage == 3
            with pytest.raises(ConfigError, match=both):
                make("zero2")
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "gradient_accumulation_steps,zero_stage")
    monkeypatch.setenv(LAUNCH_FILE, "zero.yaml")
    both = r"zero_config and the file .* both .*gradient_accumulation_steps, zero_stage, in zero.y"
    with pytest.raises(ConfigError, match=both):
        make("zero3")


def test_another_deepspeed(
    make: Make, common: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is refused, and nothing is filled in beside it."""
    with monkeypatch.context() as patch:
        patch.setenv("HF_ZERO_BACKEND", "deepspeed")
        with pytest.raises(ConfigError, match="HF_ZERO_BACKEND"):
            make("zero2")
    with monkeypatch.context() as patch:
        patch.setattr(theirs, "HfDeepSpeedConfig", type("HfDeepSpeedConfig", (), {}))
        with pytest.raises(ConfigError, match="imported before hf-zero answered"):
            require_answering_imports()
    monkeypatch.setattr(finder, "chosen", lambda: False)
    stock = transformers.TrainingArguments(**common, deepspeed=STAGE_2)
    assert "gradient_clipping" not in live(stock)
