"""Translation of configurations for DeepSpeed and FSDP."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from hf_zero.cli.app import app
from hf_zero.config import ZeroConfig
from hf_zero.config.migrating import migrate
from hf_zero.errors import ConfigError
from tests.helpers.cells import in_one_item

DEEPSPEED = yaml.safe_load("""
_comment: ours
zero_optimization:
  {stage: 3, overlap_comm: true, stage3_param_persistence_threshold: auto,
   offload_optimizer: {device: cpu, pin_memory: true}, round_robin_gradients: true, //: speed}
bf16: {enabled: auto, loss_scale: 0}
optimizer: {type: AdamW, params: {lr: auto}}
fp16: {enabled: false, opt_level: O2}
gradient_clipping: auto
steps_per_print: 2000
autotuning: {enabled: false}
train_micro_batch_size_per_gpu: auto
learning_rate: 0.001
unheard_of: 1
""")
FSDP = yaml.safe_load("""
{compute_environment: LOCAL_MACHINE, distributed_type: FSDP, mixed_precision: bf16,
 num_machines: 2, num_processes: 8, machine_rank: 0, main_training_function: main, use_cpu: false}
""")


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
    names = {"_comment", "zero_optimization.//", "bf16.loss_scale", "fp16.opt_level"}
    assert left.keys() == names | {"learning_rate", "unheard_of"}
    assert left["bf16.loss_scale"].startswith("bf16 has the range of fp32")
    assert "optimizer.params.lr" in left["learning_rate"]
    assert left["unheard_of"] == "not known here"
    idle = {key for key, (outcome, note) in found.items() if outcome == "no effect" and note}
    assert "autotuning" in idle
    config = ZeroConfig.from_dict(migration.after, allow_auto=True)
    assert (config.stage, config.offload_optimizer.device) == (3, "cpu")
    assert migration.after["gradient_clipping"] == "auto"
    assert migration.before == DEEPSPEED


# Of fsdp_config, and the section of Accelerate that it becomes.
STAGES = """
{}: {zero_stage: 3}
{fsdp_cpu_ram_efficient_loading: false}: {zero_stage: 3, zero3_init_flag: false}
{fsdp_sharding_strategy: NO_SHARD}: {zero_stage: 0}
{fsdp_sharding_strategy: HYBRID_SHARD_ZERO2}: {zero_stage: 2, replicate_size: 2}
{fsdp_version: 2, fsdp_reshard_after_forward: false}: {zero_stage: 2}
{fsdp_offload_params: true, fsdp_sharding_strategy: SHARD_GRAD_OP}:
  {zero_stage: 2, offload_optimizer_device: cpu}
{fsdp_activation_checkpointing: true, fsdp_activation_checkpointing_offload: true}:
  {zero_stage: 3, activation_checkpointing: {blocks: true, cpu_checkpointing: true}}
{fsdp_state_dict_type: FULL_STATE_DICT}: {zero_stage: 3, zero3_save_16bit_model: true}
"""


@in_one_item(re.split(r"\n(?=\{)", STAGES.strip()))
def test_fsdp_becomes_a_stage(row: str) -> None:
    written, section = map(yaml.safe_load, re.split(r"(?<=\}):\s", row))
    migration = migrate(FSDP | {"fsdp_config": written})
    assert migration.runs
    assert migration.after["deepspeed_config"] == section | {"gradient_clipping": 0.0}
    assert migration.after["distributed_type"] == "DEEPSPEED"
    assert "fsdp_config" not in migration.after
    found = outcomes(migration.findings)
    assert all(found[f"fsdp_config.{key}"][0] in ("translated", "no effect") for key in written)
    assert ZeroConfig.from_dict(migration.after).stage == section["zero_stage"]


def test_files_whose_kind_decides_the_stage() -> None:
    bare_no = yaml.safe_load("distributed_type: NO\nmixed_precision: bf16")
    for written, stage in (
        (FSDP, 3),
        (bare_no, 0),
        ({"fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP"}}, 2),
        (FSDP | {"distributed_type": "MULTI_GPU", "fsdp_config": {}}, 0),
        (FSDP | {"distributed_type": "NO", "fsdp_config": {}}, 0),
    ):
        migration = migrate(written)
        section = {"zero_stage": stage, "gradient_clipping": 0.0}
        assert migration.runs and migration.after["deepspeed_config"] == section, written
        assert ZeroConfig.from_dict(migration.after).stage == stage


def test_every_key_of_fsdp_in_accelerate_is_known() -> None:
    from accelerate.commands.launch import launch_command_parser

    options = [name for each in launch_command_parser()._actions for name in each.option_strings]
    names = {name.lstrip("-") for name in options if name.startswith("--fsdp_")}
    values = {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": "FULL_SHARD"}
    values["fsdp_state_dict_type"] = "SHARDED_STATE_DICT"
    migration = migrate(FSDP | {"fsdp_config": {name: values.get(name, True) for name in names}})
    assert len(names) > 12 and migration.runs
    assert all(found.outcome != "left out" for found in migration.findings)


# A file, and after "=>" a key of it with its outcome and a part of the note. "FSDP" is a file of
# Accelerate for FSDP with these keys added. Nothing runs with a key to fix.
FINDINGS = """
{zero_optimization: {stage: 5}} => zero_optimization.stage: to fix, is not
{distributed_type: DEEPSPEED, num_processes: two} => num_processes: to fix, is not
{deepspeed_config: {zero_stage: 7}} => deepspeed_config.zero_stage: to fix, is not
{optimizer: {type: SOAP}} => optimizer.type: to fix, SOAP' is not built into
{scheduler: {type: Cosine}} => scheduler.type: to fix, did you mean 'CosineAnnealingLR'
{train_batch_size: 16, train_micro_batch_size_per_gpu: 4, gradient_accumulation_steps: 3}
    => train_batch_size: to fix, 16 is no multiple of
{zero_optimization: {stage: 2, offload_optimizer: cpu}}
    => zero_optimization.offload_optimizer: to fix, write {'offload_optimizer': {'device': …}}
FSDP {fsdp_config: {fsdp_offload_params: ture}}
    => fsdp_config.fsdp_offload_params: to fix, neither true nor false
FSDP {fsdp_config: {fsdp_sharding_strategy: FULL_SHRAD}}
    => fsdp_config.fsdp_sharding_strategy: to fix, did you mean FULL_SHARD?
FSDP {fsdp_config: {fsdp_state_dict_type: FULL}}
    => fsdp_config.fsdp_state_dict_type: to fix, not a type of state dict
FSDP {distributed_type: FSPD} => distributed_type: to fix, did you mean FSDP?
{optimizer: {type: OneBitAdam}, zero_optimization: {stage: 1}} => optimizer.type: taken,
{optimizer: {type: OneBitAdam}, zero_optimization: {stage: 3}} => optimizer.type: to fix,
{train_batch_size: 16, elasticity: {enabled: true, max_train_batch_size: 64,
    micro_batch_sizes: [2, 4]}} => train_batch_size: to fix,
{elasticity: {enabled: true, min_gpus: 8, max_gpus: 4}} => elasticity: to fix, no batch of at most
{elasticity: {enabled: true, micro_batch_sizes: auto}} => elasticity: to fix, 'auto'
{elasticity: {enabled: true, model_parallel_size: 2}} => elasticity: to fix, write 1
{elasticity: {enabled: false, min_gpus: 8, max_gpus: 4}} => elasticity: taken,
{train_batch_size: 16, elasticity: {enabled: true, max_train_batch_size: 64,
    micro_batch_sizes: [2, 4], ignore_non_elastic_batch_info: true}} => train_batch_size: taken,

{gradient_accumulation_steps: "8"} => gradient_accumulation_steps: translated, 8, without quotes
{optimizer: {type: onebitadam, params: {lr: 0.1, cuda_aware: true}}}
    => optimizer.params.cuda_aware: no effect, messages travel
{deepspeed_config: {zero_stage: 3}, fsdp_config: {}} => fsdp_config: no effect, it is empty
DYNAMO {mode: max-autotune} => dynamo_config.mode: translated, without CUDA graphs

{steps_per_prnt: 10} => steps_per_prnt: to fix, did you mean 'steps_per_print'
FSDP {fsdp_config: {fsdp_use_orig_param: true}}
    => fsdp_config.fsdp_use_orig_param: to fix, did you mean 'fsdp_use_orig_params'?
FSDP {parallelism_config: {parallelism_config_tp_sise: 2}}
    => parallelism_config.parallelism_config_tp_sise: to fix, mean 'parallelism_config_tp_size'?
FSDP {fsdp_config: {fsdp_reshard: true}}
    => fsdp_config.fsdp_reshard: to fix, did you mean 'fsdp_reshard_after_forward'?
FSDP {fsdp_config: {fsdp_actckpt: true}}
    => fsdp_config.fsdp_actckpt: to fix, no key of fsdp_config
FSDP {fsdp_offload_params: true} => fsdp_offload_params: to fix, put it under fsdp_config
FSDP {fsdp_strategy: FULL_SHARD} => fsdp_strategy: to fix, not known here
{fsdp_transformer_layer_cls_to_wrp: Block, fsdp_version: 2}
    => fsdp_config.fsdp_transformer_layer_cls_to_wrp: to fix, mean 'fsdp_transformer_layer_cls_to_wr
FSDP {fsdp_confg: {}} => fsdp_confg: to fix, did you mean 'fsdp_config'?
{deepspeed_config: {}, zero_stage: 3} => zero_stage: to fix, put 'zero_stage' under
{deepspeed_config: {}, bf16: true} => bf16: to fix, write mixed_precision: bf16
{deepspeed_config: {zero_optimization: {stage: 3}}}
    => deepspeed_config.zero_optimization: to fix, deepspeed_config_file names
{deepspeed_config: {fsdp: {sharding_strategy: FULL_SHARD}}}
    => deepspeed_config.fsdp: to fix, write zero_optimization in a DeepSpeed JSON
{deepspeed_config: {stage3_prefetch_bucket_size: 1000}}
    => deepspeed_config.stage3_prefetch_bucket_size: to fix, write zero_optimization.stage3_prefetch
{deepspeed_config: {zero: {stage: 3}}} => deepspeed_config.zero: to fix, did you mean 'zero_stage'

FSDP {fsdp_config: {fsdp_ignored_modules: x}} => fsdp_config.fsdp_ignored_modules: left out,
{bf16: {}, model: {type: gpt}} => model: left out,
{bf16: {}, amp_config: {enabled: true}} => amp_config: left out,
{activation_checkpointing: {partition_activations: true, blocks: true}}
    => activation_checkpointing.partition_activations: left out, tensor-parallel
{bf16: {}, autotuning: {enabled: true}} => autotuning: left out, --fit
{bf16: {}, autotuning: {enabled: false}} => autotuning: no effect, does not provide autotuning

{deepspeed_config: {zero_stage: 3, seq_parallel_communication_data_type: bf16}}
    => deepspeed_config.seq_parallel_communication_data_type: no effect,
{deepspeed_config: {zero_stage: 3, sparse_gradients: true}}
    => deepspeed_config.sparse_gradients: left out,
{zero_optimization: {stage: 2, offload_param: {device: cpu}}}
    => zero_optimization.offload_param.device: no effect, stage 2
{zero_optimization: {stage: 2, offload_optimizer: {device: nvme, nvme_path: /scratch}},
    aio: {queue_depth: 8}} => aio.queue_depth: taken,

FSDP {dynamo_config: {dynamo_backend: "NO"}} => dynamo_config: no effect, nothing is compiled
{distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 2},
    dynamo_config: {dynamo_backend: INDUCTOR}} => dynamo_config: no effect, compile: blocks
DYNAMO {dynamo_use_fullgraph: false}
    => dynamo_config.dynamo_use_fullgraph: no effect, may break the graph
DYNAMO {dynamo_use_dynamic: "no"}
    => dynamo_config.dynamo_use_dynamic: translated, compile: {dynamic: false}
DYNAMO {dynamo_use_dynamic: perhaps}
    => dynamo_config.dynamo_use_dynamic: to fix, "perhaps" is neither true nor false
DYNAMO {dynamo_mode: reduce-overhead}
    => dynamo_config.dynamo_mode: left out, without CUDA graphs
DYNAMO {dynamo_mode: null} => dynamo_config.dynamo_mode: no effect, it is empty
DYNAMO {dynamo_use_dynamc: true}
    => dynamo_config.dynamo_use_dynamc: to fix, did you mean 'dynamo_use_dynamic'?
DYNAMO {use_fullgraph: true} => dynamo_config.use_fullgraph: left out, several graphs
DYNAMO {dynamo_use_regional_compilation: true}
    => dynamo_config.dynamo_use_regional_compilation: no effect, block by block
"""


@in_one_item(re.split(r"\n(?=[^\s])", re.sub(r"(?m)^(#.*)?\n", "", FINDINGS).strip()))
def test_findings(row: str) -> None:
    given, expected = re.sub(r"\s*\n\s*", " ", row).split(" => ")
    kind, _, written = given.partition("{")
    config = yaml.safe_load("{" + written)
    if kind == "DYNAMO ":
        config = {"dynamo_config": {"dynamo_backend": "INDUCTOR"} | config}
    migration = migrate(FSDP | config if kind else config)
    key, outcome, part = re.fullmatch(r"(\S+): ([\w ]+),(.*)", expected).groups()
    found, note = outcomes(migration.findings)[key]
    assert found == outcome and part.strip() in note, (found, note)
    assert migration.runs is (outcome != "to fix")


def test_a_file_without_any_known_key_is_refused() -> None:
    for written in ({"a": 1}, {}, {"learning_rate": 0.1, "num_train_epochs": 3, "x": 1, "y": 2}):
        with pytest.raises(ConfigError, match=r"ds\.json: .* pass a DeepSpeed JSON or an Accel"):
            migrate(written, "config file ds.json")


def test_what_leaves_accelerates_section_and_what_stays() -> None:
    """TRL's example for long sequences has the first key."""
    names = {"seq_parallel_communication_data_type": "bf16", "sparse_gradients": True}
    before = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3, **names}}
    migration = migrate(before | {"fsdp_config": {}})
    found = outcomes(migration.findings)
    assert [found[f"deepspeed_config.{name}"][0] for name in names] == ["no effect", "left out"]
    assert migration.runs and migration.after["deepspeed_config"] == {"zero_stage": 3}
    assert found["fsdp_config"] == ("no effect", "it is empty")
    assert list(migration.after) == list(before)  # in the order of the file
    section = {"zero_stage": 2, "offload_optimizer_device": "none"}
    wrong = migrate({"deepspeed_config": section | {"zero_stag": 3}, "num_processes": 2})
    assert outcomes(wrong.findings)["deepspeed_config.zero_stag"][0] == "to fix"
    assert wrong.after["deepspeed_config"] == section


def test_a_launcher_of_several_hosts_that_starts_deepspeed_becomes_standard() -> None:
    key = "deepspeed_multinode_launcher"
    written = {"deepspeed_config": {"zero_stage": 3, key: "pdsh"}, "num_machines": 2}
    migration = migrate(written)
    assert migration.runs and migration.after["deepspeed_config"][key] == "standard"
    outcome, note = outcomes(migration.findings)[f"deepspeed_config.{key}"]
    assert outcome == "translated" and "run accelerate launch on each host" in note
    told = {row.key: row.note for row in ZeroConfig.from_dict(written).explain()}
    assert told[f"deepspeed_config.{key}"].startswith("a run refuses it: pdsh runs")


def test_sizes_of_a_mesh_are_translated() -> None:
    sizes = {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "cp": 4}
    mesh = {f"parallelism_config_{name}_size": size for name, size in sizes.items()}
    migration = migrate(FSDP | {"fsdp_config": {"fsdp_version": 2}, "parallelism_config": mesh})
    assert migration.after["deepspeed_config"] == {
        "zero_stage": 3,
        "replicate_size": 2,
        "tensor_parallel": {"autotp_size": 2},
        "gradient_clipping": 0.0,
    }
    assert migration.after["parallelism_config"] == {"parallelism_config_cp_size": 4}
    for kind, size in (("sp", 1), ("sp", 2), ("cp", 2)):  # settings beside a size stay with it
        prefix = f"parallelism_config_{kind}"
        named = {f"{prefix}_size": size, f"{prefix}_backend": "deepspeed"}
        after = migrate(FSDP | {"parallelism_config": named}).after
        assert after.get("parallelism_config") == (named if size == 2 else None)


def test_a_file_that_a_file_names_is_migrated_on_its_own(tmp_path: Path) -> None:
    path, key = tmp_path / "ds.json", "deepspeed_config.deepspeed_config_file"
    written = {"deepspeed_config": {"deepspeed_config_file": str(path)}}
    elsewhere = migrate(written)  # it is not on this machine
    assert elsewhere.runs and outcomes(elsewhere.findings)[key][0] == "taken"
    path.write_text('{"zero_optimization": {"stages": 3}}')
    migration = migrate(written)
    outcome, note = outcomes(migration.findings)[key]
    assert outcome == "to fix" and not migration.runs
    assert "zero_optimization.stages" in note and f"hf-zero migrate {path}" in note


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
    assert "translated  (added)\n            gradient_clipping: 0.0" in shown.output
    done = hf_zero("migrate", str(source), "-o", str(out))
    assert done.exit_code == 0
    assert "+distributed_type: DEEPSPEED" in done.output
    assert "fsdp_config.fsdp_offload_params" in done.output
    assert "written: " in done.output and " translated" in done.output
    assert "next: hf-zero parity --ranks 2 -- your_script.py" in done.output
    loaded = load_config_from_file(str(out))
    assert loaded.deepspeed_config["offload_param_device"] == "cpu"
    assert ZeroConfig.from_file(out).stage == 3
    with pytest.raises(ConfigError, match=r"zero3\.yaml exists; remove it, or pass another"):
        hf_zero("migrate", str(source), "-o", str(out))
    again = json.loads(hf_zero("migrate", str(out), "--json").output)
    assert again["runs"] and {row["outcome"] for row in again["findings"]} == {"taken"}


EAGER = {"blocks": True, "backend": "eager"}


@in_one_item(
    [
        ({"enabled": True, "backend": "eager"}, EAGER, "translated"),
        ({"deepcompile": True, "passes": ["x"]}, {"blocks": True}, "translated"),
        ({"disable": False, "backend": "eager"}, EAGER, "translated"),
        ({"enabled": False, "backend": "eager"}, None, "no effect"),
    ]
)
def test_a_compiled_model_becomes_compiled_blocks(case: Any) -> None:
    written, kept, outcome = case
    migration = migrate({"zero_optimization": {"stage": 2}, "compile": written})
    assert migration.runs and migration.after.get("compile") == kept
    (found,) = [found for found in migration.findings if found.key.startswith("compile")]
    assert found.outcome == outcome and "remove" not in found.note
    assert ("passes" in found.note) is ("passes" in written)
    assert ZeroConfig.from_dict(migration.after).compile.blocks is (kept is not None)


@in_one_item([None, "auto", 1.5, 2.0])
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


PROGRAMS = {
    "GPT-NeoX": {"pipe-parallel-size": 1, "num-layers": 12, "zero_optimization": {"stage": 1}},
    "verl": {"actor_rollout_ref": {"actor": {}}, "trainer": {"nnodes": 1}},
    "LLaMA-Factory": {"finetuning_type": "lora", "cutoff_len": 10, "deepspeed": "ds.json"},
    "Axolotl": {"base_model": "a/b", "micro_batch_size": 2, "deepspeed": "ds.json"},
    "Megatron-LM": {"tensor_model_parallel_size": 2, "micro-batch-size": 2},
}


@in_one_item(PROGRAMS)
def test_files_of_other_programs_are_named(program: str) -> None:
    with pytest.raises(ConfigError, match=rf"config dict is a configuration of {program}") as ended:
        migrate(PROGRAMS[program])
    assert ("pass ds.json" in str(ended.value)) is ("deepspeed" in PROGRAMS[program])
    assert migrate({"zero_optimization": {"stage": 1}, "micro_batch_size": 2}).findings


def test_fsdp_of_the_trainer_becomes_a_configuration_for_deepspeed() -> None:
    config = {
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "fsdp_version": 2,
        "reshard_after_forward": False,
        "activation_checkpointing": True,
        "xla": False,
    }
    own = migrate(config)
    assert own.runs and ZeroConfig.from_dict(own.after, allow_auto=True).stage == 2
    assert "xla" not in own.after and own.after["activation_checkpointing"] == {"blocks": True}
    notes = {found.key: (found.outcome, found.note) for found in own.findings}
    key = "fsdp_config.reshard_after_forward"
    assert notes[key] == ("translated", "zero_optimization.stage: 2")
    arguments = {"output_dir": "out", "fsdp": "full_shard auto_wrap offload", "bf16": True}
    after = migrate({**arguments, "fsdp_config": {"transformer_layer_cls_to_wrap": ["A"]}}).after
    loading = migrate({**arguments, "fsdp_config": {"cpu_ram_efficient_loading": True}}).findings
    (found,) = [each for each in loading if each.key.endswith("cpu_ram_efficient_loading")]
    assert (found.outcome, found.note[:12]) == ("no effect", "the Trainer ")
    on_cpu = {"device": "cpu"}
    zero = after["deepspeed"].pop("zero_optimization")
    assert zero == {"stage": 3, "offload_optimizer": on_cpu, "offload_param": on_cpu}
    assert {*after} == {"output_dir", "bf16", "deepspeed"}
    two = {"fsdp": "full_shard shard_grad_op"}
    for wrong in ({"fsdp": "full_shard offlaod"}, two, {"fsdp_config": "fsdp.json"}):
        assert not migrate({**arguments, **wrong}).runs, wrong


def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    out = tmp_path / f"{'n' * 251}.json"
    with pytest.raises(ConfigError, match=r"cannot be written \(File name too long\)"):
        hf_zero("migrate", str(tmp_path / "ds.json"), "-o", str(out))


def test_names_of_a_file_do_not_control_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"zero_optimization": {}, "\x1b[31m\u202e": 1}))
    shown = CliRunner().invoke(app, ["migrate", str(tmp_path / "a.json")], catch_exceptions=False)
    assert "\\x1b[31m\\u202e" in shown.output and not set("\x1b\u202e") & set(shown.output)
    fsdp = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "fsdp_config": [1]}
    with pytest.raises(ConfigError, match=r"fsdp_config is .* not keys and values"):
        migrate(fsdp)
