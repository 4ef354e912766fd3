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

import hf_zero
from hf_zero.config.launched import LAUNCH_FILE
from hf_zero.errors import ConfigError, HfZeroError
from hf_zero.integrations import finder
from hf_zero.integrations.transformers.trainer_route import open_left_out, read
from hf_zero.integrations.transformers.training_arguments import (
    TrainingArguments,
    require_answering_imports,
)

pytestmark = pytest.mark.usefixtures("plain_process")


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., TrainingArguments]:
    def build(zero_config: Any = None, **changes: Any) -> TrainingArguments:
        return TrainingArguments(
            **{"output_dir": str(tmp_path), "report_to": "none", "use_cpu": True, **changes},
            zero_config=zero_config,
        )

    return build


def live(args: Any) -> dict[str, Any]:
    """The config that the engine will see."""
    return args.deepspeed_plugin.hf_ds_config.config


def test_it_is_a_public_name_and_a_stock_class_too() -> None:
    assert hf_zero.TrainingArguments is TrainingArguments
    assert issubclass(TrainingArguments, transformers.TrainingArguments)


@pytest.mark.parametrize(
    "form", ["object", "dict", "keywords", "json", "yaml file", "path", "text", "preset"]
)
def test_every_form_of_a_config(
    form: str, make: Callable[..., TrainingArguments], tmp_path: Path
) -> None:
    dialect = {"zero_optimization": {"stage": 2}}
    (tmp_path / "zero.json").write_text(json.dumps(dialect))
    (tmp_path / "zero.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n"
    )
    forms: dict[str, Any] = {
        "object": hf_zero.ZeroConfig(stage=2),
        "dict": dialect,
        "keywords": {"stage": 2},
        "json": str(tmp_path / "zero.json"),
        "yaml file": str(tmp_path / "zero.yaml"),
        "path": tmp_path / "zero.json",
        "text": json.dumps(dialect),
        "preset": "zero2",
    }
    args = make(forms[form])
    assert args.deepspeed == dialect
    assert live(args)["zero_optimization"]["stage"] == 2
    assert args.deepspeed_plugin.zero_stage == 2


def test_without_a_config_it_is_the_stock_class(
    make: Callable[..., TrainingArguments], tmp_path: Path
) -> None:
    ours = make()
    stock = transformers.TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    assert ours.deepspeed is None and ours.deepspeed_plugin is None
    assert {**ours.to_dict(), "zero_config": None} == {**stock.to_dict(), "zero_config": None}


def test_what_the_config_leaves_out_comes_from_the_arguments(
    make: Callable[..., TrainingArguments],
) -> None:
    config = {"stage": 1, "optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupDecayLR"}}
    args = make(
        config,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        max_grad_norm=0.25,
        learning_rate=2e-4,
        weight_decay=0.1,
        bf16=True,
    )
    found = live(args)
    assert (
        found["train_micro_batch_size_per_gpu"],
        found["gradient_accumulation_steps"],
        found["train_batch_size"],
    ) == (3, 2, 6)
    assert found["gradient_clipping"] == 0.25
    assert found["bf16"]["enabled"] is True and found["fp16"]["enabled"] is False
    assert found["optimizer"]["params"] == {
        "lr": 2e-4,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.1,
    }
    assert found["scheduler"]["params"] == {
        "warmup_min_lr": 0,
        "warmup_max_lr": 2e-4,
        "warmup_num_steps": "auto",
        "total_num_steps": "auto",
    }
    assert args.deepspeed_plugin.hf_ds_config.dtype().itemsize == 2


def test_stock_arguments_with_the_same_config_mean_the_same(
    make: Callable[..., TrainingArguments], tmp_path: Path
) -> None:
    config = {
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "SGD", "params": {"momentum": 0.9}},
    }
    stock = transformers.TrainingArguments(
        output_dir=str(tmp_path), report_to="none", use_cpu=True, deepspeed=config
    )
    ours = make(config)
    assert live(ours) == live(stock)
    assert live(ours)["optimizer"]["params"] == {"momentum": 0.9, "lr": 5e-5, "weight_decay": 0.0}
    assert live(ours)["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True
    assert ours == make(deepspeed=config)
    assert config == {
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "SGD", "params": {"momentum": 0.9}},
    }


def test_auto_written_out_means_left_out(make: Callable[..., TrainingArguments]) -> None:
    autos = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
    }
    assert live(make({"stage": 2, **autos})) == live(make("zero2"))


def test_a_choice_not_to_gather_weights_is_kept() -> None:
    config: dict[str, Any] = {
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}
    }
    open_left_out(config)
    assert config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is False


@pytest.mark.parametrize(
    ("config", "changes", "values"),
    [
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
    ],
)
def test_a_contradiction_shows_both_values(
    config: dict[str, Any],
    changes: dict[str, Any],
    values: tuple[str, ...],
    make: Callable[..., Any],
) -> None:
    with pytest.raises(ConfigError, match="contradicts the training arguments") as raised:
        make({"stage": 2, **config}, **changes)
    assert all(value in str(raised.value) for value in values)


def test_a_precision_in_the_config_alone_is_no_contradiction(
    make: Callable[..., TrainingArguments],
) -> None:
    args = make({"stage": 2, "bf16": {"enabled": True}}, use_cpu=False)
    assert args.deepspeed_plugin.hf_ds_config.dtype().itemsize == 2
    assert live(args)["bf16"]["enabled"] is True


@pytest.mark.parametrize(
    ("config", "what"),
    [({"stag": 2}, "did you mean"), ("zero7", "zero3"), ({"stage": 9}, "9"), (7, "int")],
)
def test_a_config_that_cannot_be_used(
    config: Any, what: str, make: Callable[..., TrainingArguments]
) -> None:
    with pytest.raises(HfZeroError, match=what):
        make(config)


def test_two_configs(make: Callable[..., TrainingArguments]) -> None:
    with pytest.raises(ConfigError, match="contradicts zero_config"):
        make("zero2", deepspeed={"zero_optimization": {"stage": 3}})


@pytest.mark.parametrize("form", ["zero3", {"stage": 3, "gradient_clipping": 1.0}])
def test_it_goes_into_json_and_comes_back(
    form: Any, make: Callable[..., TrainingArguments]
) -> None:
    args = make(form)
    # written as <HUB_TOKEN>
    back = TrainingArguments(**{**json.loads(args.to_json_string()), "hub_token": None})
    assert back == args and live(back) == live(args)
    assert dataclasses.replace(args, learning_rate=1e-2).learning_rate == 1e-2
    assert type(args).__name__ in repr(args)


def test_an_object_goes_into_json_too(make: Callable[..., TrainingArguments]) -> None:
    args = make(hf_zero.ZeroConfig(stage=1, bf16=True), bf16=True)
    assert json.loads(args.to_json_string())["zero_config"] == {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
    }


def test_the_command_line(tmp_path: Path) -> None:
    common = ["--output_dir", str(tmp_path), "--report_to", "none", "--use_cpu"]
    for text in ("zero2", '{"zero_optimization": {"stage": 2}}'):
        (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
            [*common, "--zero_config", text]
        )
        assert live(args)["zero_optimization"]["stage"] == 2
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(common)
    assert args.zero_config is None and args.deepspeed_plugin is None


def test_an_accelerate_file_that_forces_the_cpu(
    make: Callable[..., TrainingArguments], tmp_path: Path
) -> None:
    (tmp_path / "zero.yaml").write_text(
        "distributed_type: DEEPSPEED\nuse_cpu: true\nmixed_precision: "
        "bf16\ndeepspeed_config:\n  zero_stage: 3\n"
    )
    args = make(str(tmp_path / "zero.yaml"), use_cpu=False)
    assert args.use_cpu and args.device.type == "cpu"
    assert live(args)["bf16"]["enabled"] is True


@pytest.mark.parametrize("by", ["stage", "file"])
def test_a_launcher_with_another_stage(
    by: str, make: Callable[..., TrainingArguments], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    if by == "stage":
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    else:
        (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 3}}')
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "zero.json"))
    assert make("zero3").deepspeed_plugin.zero_stage == 3
    with pytest.raises(
        ConfigError, match=r"asks for stage 2, and `accelerate launch.*` for stage 3"
    ):
        make("zero2")


def test_settings_of_the_launchers_file_beside_it_are_refused_in_our_words(
    make: Callable[..., TrainingArguments], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate's own answer names its plugin, and neither the argument nor the file."""
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "gradient_accumulation_steps,zero_stage")
    monkeypatch.setenv(LAUNCH_FILE, "zero.yaml")
    with pytest.raises(ConfigError) as refused:
        make("zero3")
    assert str(refused.value) == (
        "zero_config and the file of accelerate launch both configure ZeRO "
        "(gradient_accumulation_steps, zero_stage, in zero.yaml); give it in one place: leave "
        "zero_config out, or start with torchrun or a plain accelerate launch"
    )


def test_another_deepspeed_is_refused(
    make: Callable[..., TrainingArguments], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ZERO_BACKEND", "deepspeed")
    with pytest.raises(ConfigError, match="HF_ZERO_BACKEND"):
        make("zero2")


def test_hollow_imports_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import deepspeed as theirs

    monkeypatch.setattr(theirs, "HfDeepSpeedConfig", type("HfDeepSpeedConfig", (), {}))
    with pytest.raises(ConfigError, match="imported before hf-zero answered"):
        require_answering_imports()


def test_with_another_deepspeed_nothing_is_filled_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finder, "chosen", lambda: False)
    stock = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        report_to="none",
        use_cpu=True,
        deepspeed={"zero_optimization": {"stage": 2}},
    )
    assert "gradient_clipping" not in live(stock)


def test_reading_changes_nothing_of_the_callers_dict() -> None:
    config = {"stage": 3, "optimizer": {"type": "AdamW", "params": {}}}
    open_left_out(read(config))
    assert config == {"stage": 3, "optimizer": {"type": "AdamW", "params": {}}}


def test_making_arguments_leaves_no_switch_behind(make: Callable[..., TrainingArguments]) -> None:
    make("zero3", use_cpu=False)
    assert "ACCELERATE_USE_DEEPSPEED" not in os.environ
    assert make().deepspeed_plugin is None
