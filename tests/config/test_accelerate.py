"""Accelerate's YAML: its keys, its section, the file it names; and the dicts that Accelerate and
transformers build.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hf_zero.config import LaunchSection, ZeroConfig
from hf_zero.config.accelerate_yaml import ACCELERATE_KEYS, TRANSLATED
from hf_zero.config.keys import KEYS
from hf_zero.errors import ConfigError

# What `accelerate config` writes.
YAML = """
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 2
  gradient_clipping: 1.0
  offload_optimizer_device: none
  offload_optimizer_nvme_path: none
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
"""


def accelerate(section: dict[str, Any] | None = None, **top: Any) -> ZeroConfig:
    return ZeroConfig.from_dict(
        {"distributed_type": "DEEPSPEED", "deepspeed_config": section or {}, **top},
        source="config file a.yaml",
    )


def test_a_standard_yaml(tmp_path: Path) -> None:
    path = tmp_path / "zero3.yaml"
    path.write_text(YAML)
    config = ZeroConfig.from_file(path)
    assert (config.stage, config.precision) == (3, "bf16")
    assert (config.gradient_accumulation_steps, config.gradient_clipping) == (2, 1.0)
    assert config.zero.gather_16bit_weights_on_model_save
    assert config.launch == LaunchSection(num_processes=8, use_cpu=True, mixed_precision="bf16")
    file, sources = f"config file {path}", config.sources
    assert sources["zero_optimization.stage"] == f"{file}: deepspeed_config.zero_stage"
    assert sources["bf16.enabled"] == f"{file}: mixed_precision"
    assert sources["num_processes"] == f"{file}: num_processes"
    rows = {row.key: row for row in config.explain()}
    assert rows["use_cpu"].value is True
    assert "zero3_init_flag" in "".join(rows) and "accelerate launch" in rows["rdzv_backend"].note
    # the engine's own view has nothing of the launcher in it
    engine = {"zero_optimization", "gradient_accumulation_steps", "gradient_clipping", "bf16"}
    assert set(config.to_dict()) == engine
    assert ZeroConfig.from_dict(config.to_dict()) == config
    assert config["gradient_clipping"] == 1.0 and "optimizer" not in config


def test_what_a_few_keys_mean() -> None:
    for written, precision in (("no", "fp32"), (False, "fp32"), ("fp16", "fp16")):  # a bare no
        assert accelerate(mixed_precision=written).precision == precision
    config = accelerate()
    said = "zero_stage, which Accelerate takes to be 2 when it is not written"
    assert config.stage == 2
    assert config.sources["zero_optimization.stage"] == f"config file a.yaml: {said}"
    sizes = {"parallelism_config_sp_size": 2, "parallelism_config_dp_shard_size": 2}
    config = accelerate(None, parallelism_config=sizes)
    assert config.sequence_parallel_size == 2
    assert "parallelism_config_sp_size" in config.sources["sequence_parallel_size"]
    config = accelerate(None, parallelism_config={"parallelism_config_cp_size": 4})
    assert (config.sequence_parallel_size, config.context_parallel_size) == (1, 4)
    both = {"sequence_parallel_size": 2}
    config = accelerate(both, parallelism_config={"parallelism_config_cp_size": 2})
    assert (config.sequence_parallel_size, config.context_parallel_size) == (2, 2)
    off = {"parallelism_config_cp_size": 1, "parallelism_config_sp_size": 2}
    empty = {"fsdp_config": {}, "fp8_config": None, "gpu_ids": "all"}
    assert accelerate(None, **empty, parallelism_config=off).stage == 2
    for wrong, said in (
        ({"parallelism_config_sp_size": "two"}, 'parallelism_config_sp_size = "two" is not'),
        ("x", 'parallelism_config = "x" is not a section; write its keys, such as par'),
    ):
        with pytest.raises(ConfigError, match=said):
            accelerate(None, parallelism_config=wrong)
    own = accelerate({"zero_stage": 3, "kernels": ["loss"], "activation_offload": True})
    assert own.kernels == ("loss",) and own.activation_offload.enabled
    assert own.sources["kernels"].endswith("deepspeed_config: kernels")


def test_every_key_of_accelerates_dataclasses_is_known() -> None:
    from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig

    theirs = {
        item.name
        for config in (ClusterConfig, SageMakerConfig)
        for item in dataclasses.fields(config)
    }
    assert theirs <= set(ACCELERATE_KEYS)
    own = {key for key in ACCELERATE_KEYS if "." not in key}
    # what the installed release no longer has, and older ones wrote
    assert own - theirs <= {"fp16", "dynamo_backend", "$schema"}


def test_every_deepspeed_option_of_accelerate_launch_is_known() -> None:
    from accelerate.commands.launch import launch_command_parser

    groups = {group.title: group for group in launch_command_parser()._action_groups}
    options = {action.dest for action in groups["DeepSpeed Arguments"]._group_actions}
    assert "zero_stage" in options
    assert options == {
        *TRANSLATED,
        *(key.partition(".")[2] for key in ACCELERATE_KEYS if "." in key),
    }
    assert set(TRANSLATED.values()) <= set(KEYS)


def test_a_deepspeed_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text('{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}}')
    named = {"deepspeed_config_file": "ds.json"}
    config = accelerate({**named, "zero3_init_flag": False}, num_processes=2)
    assert (config.stage, config.precision, config.launch.num_processes) == (1, "bf16", 2)
    stage = "zero_optimization.stage"
    assert config.sources[stage] == f"config file ds.json: {stage}"
    said = r'gradient_clipping is given besides .* = "ds\.json", .*move it into ds\.json'
    with pytest.raises(ConfigError, match=said):
        accelerate({**named, "gradient_clipping": 1.0})
    with pytest.raises(ConfigError, match="mixed_precision is given besides"):
        accelerate(named, mixed_precision="bf16")
    said = r"kernels is given besides deepspeed_config\.deepspeed_config_file"
    with pytest.raises(ConfigError, match=said):
        accelerate({**named, "kernels": "auto"})
