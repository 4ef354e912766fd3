"""Translation of configurations for DeepSpeed and FSDP: the finding for each key, and files that
Accelerate and hf-zero read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from hf_zero.cli.app import app
from hf_zero.config import ZeroConfig
from hf_zero.config.migrating import migrate
from hf_zero.config.sections import OptimizerConfig
from hf_zero.errors import ConfigError
from hf_zero.optim.build import build_optimizer, refused

DEEPSPEED = {
    "_comment": "ours",
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "stage3_param_persistence_threshold": "auto",
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "round_robin_gradients": True,
        "//": "speed",
    },
    "bf16": {"enabled": "auto", "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "fp16": {"enabled": False, "opt_level": "O2"},
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "autotuning": {"enabled": False},
    "train_micro_batch_size_per_gpu": "auto",
    "learning_rate": 1e-3,
    "unheard_of": 1,
}


def hf_zero(*arguments: str) -> Any:
    """Run the command in this process; raises what it does not report itself."""
    done = CliRunner().invoke(app, list(arguments))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def outcomes(findings: Any) -> dict[str, tuple[str, str]]:
    return {found.key: (found.outcome, found.note) for found in findings}


def test_keys_of_deepspeed_are_taken_or_said_to_be_left_out() -> None:
    migration = migrate(DEEPSPEED)
    found = outcomes(migration.findings)
    assert migration.runs
    left = {key: note for key, (outcome, note) in found.items() if outcome == "left out"}
    assert left.keys() == {
        "_comment",
        "zero_optimization.//",
        "bf16.loss_scale",
        "fp16.opt_level",
        "learning_rate",
        "unheard_of",
    }
    assert left["bf16.loss_scale"].startswith("bf16 has the range of fp32")
    assert "optimizer.params.lr" in left["learning_rate"]
    assert left["unheard_of"] == "not known here"
    idle = {key for key, (outcome, note) in found.items() if outcome == "no effect" and note}
    assert "autotuning" in idle
    config = ZeroConfig.from_dict(migration.after, allow_auto=True)
    assert (config.stage, config.offload_optimizer.device) == (3, "cpu")
    assert migration.after["gradient_clipping"] == "auto"
    assert migration.before == DEEPSPEED


FSDP = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_machines": 2,
    "num_processes": 8,
    "machine_rank": 0,
    "main_training_function": "main",
    "use_cpu": False,
}


@pytest.mark.parametrize(
    ("written", "section"),
    [
        ({}, {"zero_stage": 3}),
        ({"fsdp_cpu_ram_efficient_loading": False}, {"zero_stage": 3, "zero3_init_flag": False}),
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, {"zero_stage": 3}),
        ({"fsdp_sharding_strategy": 2}, {"zero_stage": 2}),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, {"zero_stage": 0}),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, {"zero_stage": 3, "replicate_size": 2}),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}, {"zero_stage": 2, "replicate_size": 2}),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": True}, {"zero_stage": 3}),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": False}, {"zero_stage": 2}),
        (
            {"fsdp_offload_params": True},
            {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "cpu"},
        ),
        (
            {"fsdp_offload_params": True, "fsdp_sharding_strategy": "SHARD_GRAD_OP"},
            {"zero_stage": 2, "offload_optimizer_device": "cpu"},
        ),
        (
            {"fsdp_activation_checkpointing": True, "fsdp_activation_checkpointing_offload": True},
            {
                "zero_stage": 3,
                "activation_checkpointing": {"blocks": True, "cpu_checkpointing": True},
            },
        ),
        ({"fsdp_cpu_ram_efficient_loading": True}, {"zero_stage": 3, "zero3_init_flag": True}),
        (
            {"fsdp_state_dict_type": "FULL_STATE_DICT"},
            {"zero_stage": 3, "zero3_save_16bit_model": True},
        ),
        ({"fsdp_state_dict_type": "SHARDED_STATE_DICT"}, {"zero_stage": 3}),
        ({"fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_min_num_params": 1}, {"zero_stage": 3}),
    ],
)
def test_fsdp_becomes_a_stage(written: dict[str, Any], section: dict[str, Any]) -> None:
    migration = migrate(FSDP | {"fsdp_config": written})
    assert migration.runs
    assert migration.after["deepspeed_config"] == section | {"gradient_clipping": 0.0}
    assert migration.after["distributed_type"] == "DEEPSPEED"
    assert "fsdp_config" not in migration.after
    found = outcomes(migration.findings)
    assert all(found[f"fsdp_config.{key}"][0] in ("translated", "no effect") for key in written)
    assert ZeroConfig.from_dict(migration.after).stage == section["zero_stage"]


def test_fsdp_without_a_section_has_the_default_of_fsdp() -> None:
    migration = migrate(FSDP)
    section = migration.after["deepspeed_config"]
    assert migration.runs and section == {"zero_stage": 3, "gradient_clipping": 0.0}
    assert ZeroConfig.from_dict(migration.after).stage == 3


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ({"zero_optimization": {"stage": 5}}, "zero_optimization.stage"),
        ({"gradient_clipping": "often"}, "gradient_clipping"),
        ({"distributed_type": "DEEPSPEED", "num_processes": "two"}, "num_processes"),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 7}},
            "deepspeed_config.zero_stage",
        ),
    ],
)
def test_a_wrong_value_of_a_known_key_is_to_fix(written: dict[str, Any], key: str) -> None:
    migration = migrate(written)
    outcome, note = outcomes(migration.findings)[key]
    assert outcome == "to fix" and " is not " in note and not migration.runs


def test_keys_of_deepspeed_without_effect_leave_accelerates_section() -> None:
    """TRL's example for long sequences has the first."""
    names = {"seq_parallel_communication_data_type": "bf16", "sparse_gradients": True}
    section = {"zero_stage": 3, **names}
    before = {"distributed_type": "DEEPSPEED", "deepspeed_config": section}
    found = outcomes((migration := migrate(before)).findings)
    outcome = [found[f"deepspeed_config.{name}"][0] for name in names]
    assert outcome == ["no effect", "left out"]
    del section["sparse_gradients"]
    assert ZeroConfig.from_dict(before).stage == 3
    assert migration.runs and migration.after["deepspeed_config"] == {"zero_stage": 3}


def test_what_fsdp_has_and_hf_zero_has_not_is_left_out() -> None:
    found = outcomes(
        migrate(
            FSDP
            | {
                "fsdp_config": {
                    "fsdp_ignored_modules": "x",
                    "fsdp_sharding_strategy": "SOME_SHARD",
                },
                "unknown": 1,
            }
        ).findings
    )
    assert found["fsdp_config.fsdp_ignored_modules"][0] == "left out"
    outcome, note = found["fsdp_config.fsdp_sharding_strategy"]
    assert outcome == "to fix" and note.startswith('"SOME_SHARD" is not a strategy of FSDP')
    assert found["unknown"][0] == "left out"


def test_every_key_of_fsdp_in_accelerate_is_known() -> None:
    from accelerate.commands.launch import launch_command_parser

    names = {
        name.lstrip("-")
        for action in launch_command_parser()._actions
        for name in action.option_strings
        if name.startswith("--fsdp_")
    }
    values = {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": "FULL_SHARD"}
    values["fsdp_state_dict_type"] = "SHARDED_STATE_DICT"
    migration = migrate(FSDP | {"fsdp_config": {name: values.get(name, True) for name in names}})
    assert len(names) > 12 and migration.runs
    assert all(found.outcome != "left out" for found in migration.findings)


MISSPELT: dict[str, tuple[dict[str, Any], str]] = {
    "fsdp_config.fsdp_use_orig_param": (
        FSDP | {"fsdp_config": {"fsdp_use_orig_param": True}},
        "did you mean 'fsdp_use_orig_params'?",
    ),
    "fsdp_config.shardin_strategy": (
        FSDP | {"fsdp_config": {"shardin_strategy": "FULL_SHARD"}},
        "did you mean 'fsdp_sharding_strategy'?",
    ),
    "fsdp_config.fsdp_offload_params": (
        FSDP | {"fsdp_config": {"fsdp_offload_params": "ture"}},
        "neither true nor false",
    ),
    "fsdp_config.fsdp_sharding_strategy": (
        FSDP | {"fsdp_config": {"fsdp_sharding_strategy": "FULL_SHRAD"}},
        "did you mean FULL_SHARD?",
    ),
    "fsdp_config.fsdp_state_dict_type": (
        FSDP | {"fsdp_config": {"fsdp_state_dict_type": "FULL"}},
        "not a type of state dict",
    ),
    "parallelism_config.parallelism_config_tp_sise": (
        FSDP | {"parallelism_config": {"parallelism_config_tp_sise": 2}},
        "did you mean 'parallelism_config_tp_size'?",
    ),
    "num_proceses": (FSDP | {"num_proceses": 2}, "did you mean 'num_processes'?"),
    "fsdp_confg": (FSDP | {"fsdp_confg": {}}, "did you mean 'fsdp_config'?"),
    "distributed_type": (FSDP | {"distributed_type": "FSPD"}, "did you mean FSDP?"),
    "zero_stage": ({"deepspeed_config": {}, "zero_stage": 3}, "put 'zero_stage' under"),
    "bf16": ({"deepspeed_config": {}, "bf16": True}, "write mixed_precision: bf16"),
    "deepspeed_config.zero_optimization": (
        {"deepspeed_config": {"zero_optimization": {"stage": 3}}},
        "deepspeed_config_file names",
    ),
    "deepspeed_config.fsdp": (
        {"deepspeed_config": {"fsdp": {"sharding_strategy": "FULL_SHARD"}}},
        "write zero_optimization in a DeepSpeed JSON",
    ),
    "deepspeed_config.stage3_prefetch_bucket_size": (
        {"deepspeed_config": {"stage3_prefetch_bucket_size": 1e6}},
        "write zero_optimization.stage3_prefetch_bucket_size in a DeepSpeed JSON, which",
    ),
    "deepspeed_config.zero": (
        {"deepspeed_config": {"zero": {"stage": 3}}},
        "did you mean 'zero_stage'",
    ),
    "deepspeed_config.zero3_init_flg": (
        {"deepspeed_config": {"zero_stage": 3, "zero3_init_flg": True}},
        "did you mean 'zero3_init_flag'?",
    ),
}


@pytest.mark.parametrize("key", MISSPELT)
def test_misspelt_keys_and_values_of_accelerate_are_to_fix(key: str) -> None:
    written, said = MISSPELT[key]
    migration = migrate(written)
    outcome, note = outcomes(migration.findings)[key]
    assert not migration.runs and outcome == "to fix" and said in note


STAGE = {"stage": 3}
REMEMBERED: list[tuple[str, Any, str]] = [
    *((name, STAGE, "'zero_optimization'") for name in ("zero", "ZeRO", "zero3", "zero_config")),
    ("zero_redundancy_optimizer", STAGE, "'zero_optimization'"),
    ("deepspeed_zero", STAGE, "'zero_optimization'"),
    ("fsdp", {"sharding_strategy": "FULL_SHARD"}, "'zero_optimization'"),
    ("fp16_config", {"enabled": True}, "'fp16'"),
    ("float16", {"enabled": True}, "'fp16'"),
    ("optim", {"type": "AdamW"}, "'optimizer'"),
    ("scheduler_config", {"type": "WarmupLR"}, "'scheduler'"),
    ("offload", {"device": "cpu"}, "'offload_optimizer' or 'offload_param'"),
    ("gradient_checkpointing", True, "'activation_checkpointing'"),
    ("cpu_offload", True, "'zero_optimization.cpu_offload'"),
    ("grad_clip", 1.0, "'gradient_clipping'"),
    ("micro_batch_size", 2, "'train_micro_batch_size_per_gpu'"),
]


@pytest.mark.parametrize(("name", "value", "meant"), REMEMBERED)
def test_sections_and_keys_by_another_name_are_to_fix(name: str, value: Any, meant: str) -> None:
    migration = migrate({"train_micro_batch_size_per_gpu": 1, name: value})
    assert not migration.runs
    assert outcomes(migration.findings)[name] == ("to fix", f"did you mean {meant}?")
    # a file written for DeepSpeed, which skips keys of other programs
    with pytest.raises(ConfigError, match=rf"unknown key '{name}'; did you mean {meant}\?"):
        ZeroConfig.from_dict({name: value}, foreign=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", {"type": "gpt"}),
        ("data", {"path": "a"}),
        ("model_parallel", {"enabled": True, "size": 2}),
        ("logging", {"folder": "a"}),
        ("zero_padding", {"padding": 1}),
        ("amp_config", {"enabled": True}),
    ],
)
def test_keys_of_other_programs_are_left_out(name: str, value: Any) -> None:
    migration = migrate({"train_micro_batch_size_per_gpu": 1, name: value})
    assert migration.runs and outcomes(migration.findings)[name][0] == "left out"


@pytest.mark.parametrize(
    "written", [{"a": 1}, {}, {"learning_rate": 0.1, "num_train_epochs": 3, "x": 1, "y": 2}]
)
def test_a_file_without_any_known_key_is_refused(written: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"ds\.json: .* pass a DeepSpeed JSON or an Accel"):
        migrate(written, "config file ds.json")


def test_a_key_that_is_added_is_named_so(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text("distributed_type: FSDP")
    said = hf_zero("migrate", str(tmp_path / "fsdp.yaml")).output
    assert "translated  (added)\n            gradient_clipping: 0.0" in said


def test_a_bare_no_in_yaml_is_a_distributed_type() -> None:
    migration = migrate(yaml.safe_load("distributed_type: NO\nmixed_precision: bf16"))
    assert migration.runs and migration.after["deepspeed_config"]["zero_stage"] == 0


def test_sections_of_fsdp_name_the_kind_of_their_file() -> None:
    migration = migrate({"fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP"}})
    assert migration.runs and migration.after["deepspeed_config"]["zero_stage"] == 2


def test_settings_beside_a_size_of_sequences_stay_with_it() -> None:
    for size in (1, 2):
        section = {"sp_size": size, "sp_backend": "deepspeed", "sp_seq_length": 4096}
        named = {f"parallelism_config_{name}": value for name, value in section.items()}
        migration = migrate(FSDP | {"parallelism_config": named})
        assert migration.runs
        assert migration.after.get("parallelism_config") == (named if size == 2 else None)


def test_file_io_without_files_has_no_effect_at_any_value() -> None:
    aio = {"block_size": 1048576, "queue_depth": 8, "thread_count": 8}
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    for device, expected in (("cpu", "no effect"), ("nvme", "taken")):
        zero["offload_optimizer"] = {"device": device, "nvme_path": "/scratch"}
        found = outcomes(migrate({"zero_optimization": zero, "aio": aio}).findings)
        assert {found[f"aio.{name}"][0] for name in aio} == {expected}


def test_features_of_activations_that_hf_zero_lacks_are_left_out() -> None:
    for on, expected in ((True, "left out"), (False, "no effect")):
        written = {"activation_checkpointing": {"partition_activations": on, "blocks": True}}
        found = outcomes(migrate(written).findings)
        outcome, note = found["activation_checkpointing.partition_activations"]
        assert outcome == expected and "tensor-parallel" in note
        assert ZeroConfig.from_dict(written).activation_checkpointing.blocks is True


def test_a_feature_that_is_off_is_named_without_advice() -> None:
    for on, expected in ((True, "left out"), (False, "no effect")):
        found = outcomes(migrate({"bf16": {}, "autotuning": {"enabled": on}}).findings)
        outcome, note = found["autotuning"]
        assert outcome == expected and "hf-zero does not provide autotuning" in note
        assert ("--fit" in note) is on


def test_sizes_of_a_mesh_are_translated() -> None:
    migration = migrate(
        FSDP
        | {
            "fsdp_config": {"fsdp_version": 2},
            "parallelism_config": {
                "parallelism_config_dp_replicate_size": 2,
                "parallelism_config_dp_shard_size": 2,
                "parallelism_config_tp_size": 2,
                "parallelism_config_cp_size": 4,
            },
        }
    )
    assert migration.after["deepspeed_config"] == {
        "zero_stage": 3,
        "replicate_size": 2,
        "tensor_parallel": {"autotp_size": 2},
        "gradient_clipping": 0.0,
    }
    assert "parallelism_config" not in migration.after
    found = outcomes(migration.findings)["parallelism_config.parallelism_config_cp_size"]
    assert found == (
        "left out",
        "write parallelism_config_sp_size: 4, which splits sequences by heads",
    )


@pytest.mark.parametrize("kind", ["MULTI_GPU", "NO"])
def test_ddp_becomes_stage_0(kind: str) -> None:
    migration = migrate(FSDP | {"distributed_type": kind, "fsdp_config": {}})
    assert migration.runs
    assert migration.after["deepspeed_config"] == {"zero_stage": 0, "gradient_clipping": 0.0}


def test_accelerates_own_section_is_kept() -> None:
    section = {"zero_stage": 2, "offload_optimizer_device": "none", "zero_stag": 3}
    migration = migrate(
        {"distributed_type": "DEEPSPEED", "deepspeed_config": section, "num_processes": 2}
    )
    assert outcomes(migration.findings)["deepspeed_config.zero_stag"][0] == "to fix"
    assert migration.after["deepspeed_config"] == {
        "zero_stage": 2,
        "offload_optimizer_device": "none",
    }


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "optimizer.type": ({"optimizer": {"type": "AdamW8bit"}}, "AdamW8bit' is not built into"),
    "scheduler.type": ({"scheduler": {"type": "Cosine"}}, "did you mean 'CosineAnnealingLR'"),
    "train_batch_size": (
        {
            "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 3,
        },
        "16 is no multiple of",
    ),
    "bf16": ({"bf16": True}, "write {'bf16': {'enabled': …}}"),
    "zero_optimization.offload_optimizer": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}},
        "write {'offload_optimizer': {'device': …}}",
    ),
    "zero_optimization.optimizer": (
        {"zero_optimization": {"optimizer": {"type": "AdamW"}}},
        "did you mean 'optimizer'?",
    ),
    "steps_per_prnt": ({"steps_per_prnt": 10}, "did you mean 'steps_per_print'"),
    "zero_optimisation": ({"zero_optimisation": {"stage": 3}}, "did you mean 'zero_optimization'"),
}  # fmt: skip


@pytest.mark.parametrize("key", REFUSED)
def test_values_that_no_run_takes_are_to_fix(key: str) -> None:
    written, said = REFUSED[key]
    migration = migrate(written)
    outcome, note = outcomes(migration.findings)[key]
    assert not migration.runs and outcome == "to fix" and said in note


def test_all_mistakes_are_found_beside_unknown_keys_and_contradictions() -> None:
    written = {
        "gradient_clip": 1.0,
        "bf16": {"enabled": True},
        "fp16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"learning_rate": 0.1, "weight_decy": 0.01}},
        "scheduler": {"type": "WarmupCosine", "params": {}},
        "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}},
    }
    found = outcomes(migrate(written, check=refused).findings)
    assert {key for key, (outcome, _) in found.items() if outcome == "to fix"} == {
        "gradient_clip",
        "bf16.enabled, fp16.enabled",
        "optimizer.params",
        "scheduler.type",
    }
    assert all(name in found["optimizer.params"][1] for name in ("write lr", "'weight_decay'"))
    assert found["zero_optimization.offload_param.device"][0] == "no effect"
    with pytest.raises(ConfigError) as raised:
        ZeroConfig.from_dict(written, check=refused)
    for said in (
        "'gradient_clip'",
        "are both true",
        "write lr",
        "'weight_decay'",
        "WarmupCosineLR",
    ):
        assert said in str(raised.value)


@pytest.mark.parametrize("machines, becomes", [(1, "pdsh"), (2, "standard")])
def test_launchers_of_several_hosts_that_start_deepspeed_become_standard(
    machines: int, becomes: str
) -> None:
    written = {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"zero_stage": 3, "deepspeed_multinode_launcher": "pdsh"},
        "num_machines": machines,
    }
    migration = migrate(written)
    key = "deepspeed_multinode_launcher"
    assert migration.runs and migration.after["deepspeed_config"][key] == becomes
    outcome, note = outcomes(migration.findings)[f"deepspeed_config.{key}"]
    assert outcome == ("taken" if machines == 1 else "translated")
    assert ("run accelerate launch on each host" in note) is (machines == 2)
    told = {row.key: row.note for row in ZeroConfig.from_dict(written).explain()}
    refuses = told[f"deepspeed_config.{key}"].startswith("a run refuses it: pdsh runs a program")
    assert refuses is (machines == 2)


def test_one_bit_is_to_fix_at_stage_3() -> None:
    for stage, outcome in ((1, "taken"), (3, "to fix")):
        written = {"optimizer": {"type": "OneBitAdam"}, "zero_optimization": {"stage": stage}}
        migration = migrate(written)
        assert outcomes(migration.findings)["optimizer.type"][0] == outcome
        told = {row.key: row.note for row in ZeroConfig.from_dict(written).explain()}
        assert told["optimizer.type"].startswith("a run refuses it: ") is (stage == 3)


def test_batch_sizes_beside_elasticity_are_to_fix() -> None:
    elastic = {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [2, 4]}
    for ignored in (False, True):
        section = elastic | {"ignore_non_elastic_batch_info": ignored}
        found = outcomes(migrate({"train_batch_size": 16, "elasticity": section}).findings)
        assert (found["train_batch_size"][0] == "to fix") is not ignored


def test_keys_without_effect_at_their_stage_are_said_to_have_none() -> None:
    zero = {"stage": 2, "offload_param": {"device": "cpu"}}
    found = outcomes(migrate({"zero_optimization": zero}).findings)
    outcome, note = found["zero_optimization.offload_param.device"]
    assert outcome == "no effect" and "stage 2" in note


def test_compilation_that_accelerate_drops_is_translated_or_named() -> None:
    dynamo = {"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default"}}
    after = migrate(FSDP | dynamo).after["deepspeed_config"]
    assert after["compile"] == {"blocks": True, "backend": "inductor", "mode": "default"}
    kept = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}}
    outcome, note = outcomes(migrate(kept | dynamo).findings)["dynamo_config"]
    assert outcome == "no effect" and "compile: blocks" in note
    off = migrate(FSDP | {"dynamo_config": {"dynamo_backend": "NO"}})
    assert outcomes(off.findings)["dynamo_config"] == ("no effect", "nothing is compiled")


def test_each_key_of_accelerates_compilation_is_translated_or_left_out_with_the_reason() -> None:
    with_use = ("use_fullgraph", "use_dynamic", "use_regional_compilation")
    for prefix in ("dynamo_", ""):  # accelerate launch adds the prefix
        config = {f"{prefix}backend": "INDUCTOR", f"{prefix}mode": "max-autotune"}
        config |= {f"{prefix}{name}": True for name in with_use}
        migration = migrate(FSDP | {"dynamo_config": config})
        assert migration.runs and migration.after["deepspeed_config"]["compile"] == {
            "blocks": True,
            "backend": "inductor",
            "mode": "max-autotune-no-cudagraphs",
            "dynamic": True,
        }
        found = outcomes(migration.findings)
        assert {f"dynamo_config.{name}" for name in config} <= found.keys()
        outcome, note = found[f"dynamo_config.{prefix}use_fullgraph"]
        assert outcome == "left out" and "several graphs" in note
        outcome, note = found[f"dynamo_config.{prefix}use_regional_compilation"]
        assert outcome == "no effect" and "block by block" in note


@pytest.mark.parametrize(
    ("key", "value", "outcome", "note"),
    [
        ("dynamo_use_fullgraph", False, "no effect", "may break the graph"),
        ("dynamo_use_dynamic", "no", "translated", "compile: {dynamic: false}"),
        ("dynamo_use_dynamic", "perhaps", "to fix", '"perhaps" is neither true nor false'),
        ("dynamo_mode", "reduce-overhead", "left out", "without CUDA graphs"),
        ("dynamo_mode", None, "no effect", "it is empty"),
        ("dynamo_use_dynamc", True, "to fix", "did you mean 'dynamo_use_dynamic'?"),
    ],
)
def test_a_key_of_accelerates_compilation(key: str, value: Any, outcome: str, note: str) -> None:
    config = {"dynamo_backend": "INDUCTOR", key: value}
    found = outcomes(migrate(FSDP | {"dynamo_config": config}).findings)
    assert found[f"dynamo_config.{key}"][0] == outcome
    assert note in found[f"dynamo_config.{key}"][1]


def test_the_order_of_a_file_stays() -> None:
    written = {"deepspeed_config": {"zero_stage": 2}, "distributed_type": "DEEPSPEED"}
    migration = migrate(written | {"fsdp_config": {}})
    assert list(migration.after) == list(written)
    assert outcomes(migration.findings)["fsdp_config"] == ("no effect", "it is empty")


def test_a_file_that_a_file_names_is_migrated_on_its_own(tmp_path: Path) -> None:
    mapping = {"distributed_type": "DEEPSPEED", "deepspeed_config": {}}
    for present in (False, True):
        path = tmp_path / "ds.json"
        if present:
            path.write_text('{"zero_optimization": {"stages": 3}}')
        migration = migrate(mapping | {"deepspeed_config": {"deepspeed_config_file": str(path)}})
        found = outcomes(migration.findings)
        outcome, note = found["deepspeed_config.deepspeed_config_file"]
        assert migration.runs is not present
        assert (outcome, "zero_optimization.stages" in note) == (
            ("to fix", True) if present else ("taken", False)
        )
        assert f"hf-zero migrate {path}" in note


def test_a_contradiction_is_left_to_fix(tmp_path: Path) -> None:
    written = {"fp16": {"enabled": True}, "bf16": {"enabled": True}}
    migration = migrate(written, "config file ds.json")
    assert not migration.runs
    outcome, note = outcomes(migration.findings)["fp16.enabled, bf16.enabled"]
    assert outcome == "to fix" and "config file ds.json: bf16.enabled" in note
    (tmp_path / "ds.json").write_text(json.dumps(written))
    done = hf_zero("migrate", str(tmp_path / "ds.json"), "-o", str(tmp_path / "out.json"))
    assert done.exit_code == 1
    assert "not written: " in done.output and "1 to fix" in done.output
    assert not (tmp_path / "out.json").exists()


def test_the_command_writes_a_file_that_accelerate_reads(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    source, out = tmp_path / "fsdp.yaml", tmp_path / "zero3.yaml"
    source.write_text(yaml.safe_dump(FSDP | {"fsdp_config": {"fsdp_offload_params": True}}))
    shown = hf_zero("migrate", str(source))
    assert "nothing is written; pass -o FILE" in shown.output
    done = hf_zero("migrate", str(source), "-o", str(out))
    assert done.exit_code == 0
    assert "+distributed_type: DEEPSPEED" in done.output
    assert "fsdp_config.fsdp_offload_params" in done.output
    assert "written: " in done.output and " translated" in done.output
    loaded = load_config_from_file(str(out))
    assert loaded.deepspeed_config["offload_param_device"] == "cpu"
    assert ZeroConfig.from_file(out).stage == 3
    with pytest.raises(ConfigError, match=r"zero3\.yaml exists; remove it, or pass another"):
        hf_zero("migrate", str(source), "-o", str(out))
    again = json.loads(hf_zero("migrate", str(out), "--json").output)
    assert again["runs"] and {row["outcome"] for row in again["findings"]} == {"taken"}


@pytest.mark.parametrize(
    ("written", "kept", "outcome"),
    [
        ({"enabled": True, "backend": "eager"}, {"blocks": True, "backend": "eager"}, "translated"),
        ({"deepcompile": True, "passes": ["x"]}, {"blocks": True}, "translated"),
        (
            {"disable": False, "backend": "eager"},
            {"blocks": True, "backend": "eager"},
            "translated",
        ),
        ({"enabled": False, "backend": "eager"}, None, "no effect"),
    ],
)
def test_a_compiled_model_becomes_compiled_blocks(
    written: dict[str, Any], kept: dict[str, Any] | None, outcome: str
) -> None:
    migration = migrate({"zero_optimization": {"stage": 2}, "compile": written})
    assert migration.runs and migration.after.get("compile") == kept
    (found,) = [found for found in migration.findings if found.key.startswith("compile")]
    assert found.outcome == outcome and "remove" not in found.note
    assert ("passes" in found.note) is ("passes" in written)
    assert ZeroConfig.from_dict(migration.after).compile.blocks is (kept is not None)


def test_numbers_and_truth_values_in_quotes_lose_them() -> None:
    migration = migrate({"fp16": {"enabled": "true"}, "gradient_accumulation_steps": "8"})
    assert migration.runs
    assert migration.after == {"fp16": {"enabled": True}, "gradient_accumulation_steps": 8}
    found = outcomes(migration.findings)
    assert found["gradient_accumulation_steps"] == ("translated", "8, without quotes")


@pytest.mark.parametrize("clipping", [None, "auto", 1.5, 2.0])
def test_the_norm_among_parameters_of_an_optimizer_becomes_clipping(clipping: Any) -> None:
    written: dict[str, Any] = {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.5}}}
    if clipping is not None:
        written["gradient_clipping"] = clipping
    migration = migrate(written)
    assert migration.runs is (clipping != 2.0)
    assert migration.after["gradient_clipping"] == (2.0 if clipping == 2.0 else 1.5)
    found = outcomes(migration.findings)
    assert ("gradient_clipping" in found) is (clipping is not None)
    assert ("optimizer.params" in found) is (clipping == 2.0)  # it holds nothing else


def test_parameters_of_one_bit_optimizers_without_effect_leave_the_file() -> None:
    params = {"lr": 0.1, "cuda_aware": True, "comm_backend_name": "nccl"}
    written = {"optimizer": {"type": "onebitadam", "params": params}}
    migration = migrate(written)
    assert migration.after["optimizer"]["params"] == {"lr": 0.1}
    found = outcomes(migration.findings)
    for name in ("cuda_aware", "comm_backend_name"):
        assert found[f"optimizer.params.{name}"][0] == "no effect"
    told = {row.key: row.note for row in ZeroConfig.from_dict(written).explain()}
    assert told["optimizer.params"].startswith("no effect: cuda_aware: messages travel")


@pytest.mark.parametrize("name", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
def test_one_bit_optimizers_take_the_switch_of_bias_correction(name: str) -> None:
    """DeepSpeed's own examples write it."""
    params = {"lr": 0.1, "bias_correction": False}
    written = {"type": name, "params": params}
    assert migrate({"optimizer": written}, check=refused).after == {"optimizer": written}
    optimizer = build_optimizer(OptimizerConfig(name, params), [torch.nn.Parameter(torch.ones(2))])
    assert optimizer.param_groups[0]["bias_correction"] is False


def test_offloaded_parameters_have_no_effect_below_stage_3_in_accelerate() -> None:
    section = {"zero_stage": 2, "offload_param_device": "cpu"}
    migration = migrate({"distributed_type": "DEEPSPEED", "deepspeed_config": section})
    outcome, note = outcomes(migration.findings)["deepspeed_config.offload_param_device"]
    assert outcome == "no effect" and "stage 2" in note
    assert migration.after["deepspeed_config"] == {"zero_stage": 2}


def test_keys_below_a_precision_that_is_auto_are_kept() -> None:
    bf16 = {"enabled": "auto", "check_grad_overflow": True}
    assert migrate({"bf16": bf16}).after == {"bf16": bf16}


def test_an_unbuilt_feature_beside_others_is_left_out() -> None:
    migration = migrate({"bf16": {"enabled": True, "bf16_optimizer_states": True}})
    outcome, note = outcomes(migration.findings)["bf16.bf16_optimizer_states"]
    assert migration.runs and migration.after == {"bf16": {"enabled": True}}
    assert outcome == "left out" and note.startswith("hf-zero does not provide optimizer states")


def test_a_narrow_terminal_breaks_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are those of the file: JSON, not Python."""
    monkeypatch.setenv("COLUMNS", "80")
    name = "stage3_gather_16bit_weights_on_model_save"
    zero = {"stage": 3, name: True, "zenflow": {"overlap_step": True}, "overlap_comm": "x"}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero}))
    lines = hf_zero("migrate", str(tmp_path / "ds.json")).output.splitlines()
    assert f"taken       zero_optimization.{name} = true" in lines
    assert all(f"zero_optimization.{key} = " in "\n".join(lines) for key in zero)
    assert not [line for line in lines[1:10] if len(line) > 80 or "True" in line]
