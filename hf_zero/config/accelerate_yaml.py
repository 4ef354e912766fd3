"""Reader of Accelerate's YAML: the keys that configure the engine, with their equivalents in the
DeepSpeed dialect, and the keys that Accelerate itself acts on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_zero.config.dialects import Dialect
from hf_zero.config.files import load_file
from hf_zero.config.keys import KEYS, SECTIONS
from hf_zero.config.measures import MONITORS
from hf_zero.config.reading import ConfigReading, meant
from hf_zero.config.sections import LaunchSection
from hf_zero.config.sourced import shown
from hf_zero.config.spelling import closest, did_you_mean
from hf_zero.config.value_types import ANYTHING, BOOLEAN, PATH, TEXT, Key, Status, ValueType, placed
from hf_zero.errors import ConfigError, NotBuiltError

_SECTION = "deepspeed_config"

# Keys of the deepspeed_config section, mapped to keys of the DeepSpeed dialect.
TRANSLATED: dict[str, str] = {
    "zero_stage": "zero_optimization.stage",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}

# Keys of the DeepSpeed dialect, ours included, that the section may hold under their own names.
# hf-zero, not Accelerate, passes them on to the ranks.
PASSED_ON = (
    "kernels", "sparse_attention", "pre_layer_norm", "compile", "attention_backend",
    "activation_checkpointing", "activation_offload", "tiled_mlp", "sequence_parallel_size",
    "context_parallel_size", "seq_parallel_communication_data_type", "curriculum_learning",
    "data_efficiency", "training_phases", "progressive_layer_drop", "tensor_parallel",
    "expert_parallel", "replicate_size", "float8_training", "checkpoint", "metrics", *MONITORS,
    "trace",
)  # fmt: skip

_LAUNCHER = "read by accelerate launch, which starts the ranks"
_UNITS = "a transformer block is gathered whole, its experts included"


def _launch(path: str, kind: ValueType, note: str = _LAUNCHER) -> Key:
    return Key(path, kind, Status.ACTIVE, note)


# sizes of parallelism_config, mapped to keys of the DeepSpeed dialect, and what to write for others
_SEQUENCE_SIZES = {
    "parallelism_config_sp_size": "sequence_parallel_size",
    "parallelism_config_cp_size": "context_parallel_size",
}
_REMEDIES = {
    "parallelism_config_tp_size": "write tensor_parallel.autotp_size in the ZeRO configuration"
}
# names at the top of the YAML whose values Accelerate alone reads and checks
_UNCHECKED = (
    "additional_args base_job_name command_file commands compute_environment debug "
    "deepspeed_config distributed_type downcast_bf16 dynamo_backend dynamo_config "
    "ec2_instance_type enable_cpu_affinity fp16 fp8_config fsdp_config gpu_ids iam_role_name "
    "image_uri machine_rank main_process_ip main_process_port main_training_function "
    "megatron_lm_config mpirun_config num_machines parallelism_config profile py_version "
    "pytorch_version rdzv_backend region sagemaker_inputs_file sagemaker_metrics_file same_network "
    "tpu_env tpu_name tpu_use_cluster tpu_use_sudo tpu_vm tpu_zone transformers_version"
)

# Keys that Accelerate itself acts on.
ACCELERATE_KEYS: dict[str, Key] = {
    key.path: key
    for key in (
        *placed(LaunchSection, "", "launch."),
        _launch("$schema", TEXT, "editors read the schema of the keys from it"),
        _launch(f"{_SECTION}.deepspeed_config_file", PATH, "the file that the values come from"),
        _launch(
            f"{_SECTION}.zero3_init_flag",
            BOOLEAN,
            "Accelerate passes it to from_pretrained, which then loads into shards",
        ),
        _launch(f"{_SECTION}.deepspeed_multinode_launcher", TEXT),
        _launch(f"{_SECTION}.deepspeed_hostfile", PATH),
        _launch(f"{_SECTION}.deepspeed_exclusion_filter", TEXT),
        _launch(f"{_SECTION}.deepspeed_inclusion_filter", TEXT),
        _launch(f"{_SECTION}.deepspeed_moe_layer_cls_names", TEXT, _UNITS),
        *(_launch(name, ANYTHING) for name in _UNCHECKED.split()),
    )
}

# names at the top of the YAML; those of Accelerate's own in its section, and all in it
TOP = [path for path in ACCELERATE_KEYS if "." not in path]
_IN_SECTION = [
    path.partition(".")[2] for path in ACCELERATE_KEYS if path.startswith(f"{_SECTION}.")
]
INSIDE = [*TRANSLATED, *PASSED_ON, *_IN_SECTION]

# Sections of the YAML that configure another engine or another kind of training, and its name.
_OTHER_ENGINES = {
    "fsdp_config": "FSDP",
    "megatron_lm_config": "Megatron-LM",
    "fp8_config": "fp8 training",
}
SIGNS = ("deepspeed_config", "distributed_type", "compute_environment", "fsdp_config")


def is_accelerate(mapping: Mapping[str, object]) -> bool:
    """Return whether ``mapping`` is an Accelerate configuration rather than a ZeRO one."""
    return any(mark in mapping for mark in SIGNS)


def kind_of(mapping: Mapping[str, object]) -> str:
    """Return the ``distributed_type`` of an Accelerate configuration, such as FSDP."""
    written = mapping.get("distributed_type")
    if written is None:
        return "FSDP" if "fsdp_config" in mapping and _SECTION not in mapping else "DEEPSPEED"
    if written is False:  # YAML parses a bare NO as false
        return "NO"
    return str(written).rpartition(".")[2].upper()


def read_accelerate(mapping: Mapping[str, Any], label: str) -> ConfigReading:
    """Read an Accelerate configuration whose distributed_type is DEEPSPEED; ``label`` names it in
    messages. Errors are collected in the returned reading's ``mistakes``.
    """
    reading = ConfigReading()
    mistakes = reading.mistakes
    kind = kind_of(mapping)
    if kind == "FSDP":  # its keys have other names and meanings: they are not judged one by one
        file = label.removeprefix("config file ") if label.startswith("config file ") else "FILE"
        mistakes.add(
            f"{label}: distributed_type = {shown(kind, label)}: the file is for FSDP; "
            f"`hf-zero migrate {file} -o zero3.yaml` translates it"
        )
        return reading
    for name in mapping:
        if name not in ACCELERATE_KEYS:
            mistakes.append(_unknown(str(name), name, label))
    if kind != "DEEPSPEED":
        mistakes.add(
            f"{label}: distributed_type = {shown(kind, label)} does not train with ZeRO; write "
            "distributed_type: DEEPSPEED"
        )
    for name, what in _OTHER_ENGINES.items():
        if mapping.get(name):
            text = (
                f"{label}: {name} asks for {what}, which hf-zero does not combine with ZeRO; "
                f"remove the section {name}"
            )
            mistakes.append(NotBuiltError(text))
    _read_parallelism(mapping, reading, label)
    for name, value in mapping.items():
        if name == "mixed_precision" and value is False:  # YAML parses a bare no as false
            value = "no"
        if name != _SECTION and name in ACCELERATE_KEYS:
            reading.put(name, value, name, label, ACCELERATE_KEYS)
    section = mapping.get(_SECTION)
    if section is None:
        section = {}
    with mistakes.collect():
        if not isinstance(section, Mapping):
            raise ConfigError(
                f"{label}: {_SECTION} = {shown(section, label)} is not a section of keys and "
                f"values; write {_SECTION}: {{zero_stage: 3}}"
            )
        _read_section(section, reading, label)
    with mistakes.collect():
        _apply_mixed_precision(reading, label)
    return reading


def _unknown(name: str, key: object, label: str) -> ConfigError:
    if name == "bf16":
        return ConfigError(f"{label}: unknown key {key!r}; write mixed_precision: bf16")
    inside = closest(name, TRANSLATED) or closest(name, KEYS)
    if inside and not closest(name, TOP):
        return ConfigError(
            f"{label}: unknown key {key!r} beside Accelerate's own; put {inside[0]!r} under "
            f"{_SECTION}, or into the file that {_SECTION}.deepspeed_config_file names"
        )
    return ConfigError(f"{label}: unknown key {key!r}{did_you_mean(name, TOP)}")


def _read_parallelism(mapping: Mapping[str, object], reading: ConfigReading, label: str) -> None:
    parallel = mapping.get("parallelism_config") or {}
    if not isinstance(parallel, Mapping):
        text = (
            f"{label}: parallelism_config = {shown(parallel, label)} is not a section; write its "
            f"keys, such as {next(iter(_SEQUENCE_SIZES))}, below it"
        )
        reading.mistakes.add(text)
        parallel = {}
    sizes = {name: parallel[name] for name in _SEQUENCE_SIZES if (parallel.get(name) or 1) != 1}
    if len(sizes) > 1:
        reading.mistakes.add(
            f"{label}: parallelism_config has both {' and '.join(sizes)}, and Accelerate takes one "
            f"of them; write the other as {_SECTION}.{' or '.join(_SEQUENCE_SIZES.values())}"
        )
    for name, size in parallel.items():
        is_size = str(name).endswith("_size") and isinstance(size, int) and size > 1
        if is_size and name not in _SEQUENCE_SIZES:
            if name.endswith(("dp_shard_size", "dp_replicate_size")) and sizes:
                continue  # the values that Accelerate derives from them are recomputed
            text = (
                f"{label}: parallelism_config.{name} = {size} asks for a parallelism that "
                f"hf-zero does not provide; {_REMEDIES.get(name, 'write 1 or remove it')}"
            )
            reading.mistakes.append(NotBuiltError(text))
    for name, size in sizes.items():
        reading.put(_SEQUENCE_SIZES[name], size, f"parallelism_config.{name}", label)


def _read_section(section: Mapping[str, object], reading: ConfigReading, label: str) -> None:
    for name in section:
        if name not in INSIDE:
            hint = _hint(str(name), section[name])
            reading.mistakes.add(f"{label}: unknown key {f'{_SECTION}.{name}'!r}{hint}")
    for name in _IN_SECTION:
        if name in section:
            reading.put(
                f"{_SECTION}.{name}", section[name], f"{_SECTION}.{name}", label, ACCELERATE_KEYS
            )
    path = reading.values.get(f"{_SECTION}.deepspeed_config_file", "none")
    if path != "none":
        beside = sorted(set(section) & {*TRANSLATED, *PASSED_ON}) + (
            ["mixed_precision"] if "mixed_precision" in reading.values else []
        )
        if beside:
            text = (
                f"{', '.join(beside)} {'are' if len(beside) > 1 else 'is'} given besides "
                f"{_SECTION}.deepspeed_config_file = {shown(path, label)}"
            )
            them = "them" if len(beside) > 1 else "it"
            reading.mistakes.add(
                f"{label}: {text}, but Accelerate reads only the file; move {them} into {path}"
            )
        reading.update(ConfigReading().read(load_file(path), f"config file {path}"))
    for name in TRANSLATED:
        if name in section and not (name.endswith("nvme_path") and section[name] == "none"):
            reading.put(TRANSLATED[name], section[name], f"{_SECTION}.{name}", label)
    reading.update(
        ConfigReading().read(
            {name: section[name] for name in PASSED_ON if name in section}, f"{label}: {_SECTION}"
        )
    )
    if "zero_optimization.stage" not in reading.values and not reading.mistakes:
        reading.put(
            "zero_optimization.stage",
            2,
            "zero_stage, which Accelerate takes to be 2 when it is not written",
            label,
        )


def _hint(name: str, value: object) -> str:
    """Return what to write in place of an unknown key ``name`` of the section."""
    in_json = f"a DeepSpeed JSON, which {_SECTION}.deepspeed_config_file names"
    if name in KEYS or name in SECTIONS:
        return f": it belongs into {in_json}"
    if nested := [key for key in KEYS if key.endswith(f".{name}")][:2]:
        return f": write {' or '.join(nested)} in {in_json}"
    if not closest(name, INSIDE) and (names := meant(name, value)):
        return f": write {' or '.join(names)} in {in_json}"
    return did_you_mean(name, INSIDE)


def _apply_mixed_precision(reading: ConfigReading, label: str) -> None:
    precision = reading.values.get("mixed_precision")
    if precision == "fp8":
        raise NotBuiltError(
            f"{label}: mixed_precision = {shown(precision, label)} asks for fp8 training, which "
            "this version of hf-zero does not provide; write bf16, fp16 or no"
        )
    if precision in ("bf16", "fp16"):
        reading.put(f"{precision}.enabled", True, "mixed_precision", label)


class AccelerateYaml(Dialect):
    """The dialect of the files of ``accelerate launch``."""

    KEYS = ACCELERATE_KEYS

    @classmethod
    def matches(cls, mapping: Mapping[str, object]) -> bool:
        return is_accelerate(mapping)

    @classmethod
    def read(cls, mapping: Mapping[str, Any], label: str) -> ConfigReading:
        return read_accelerate(mapping, label)
