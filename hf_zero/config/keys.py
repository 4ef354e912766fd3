"""The table of all configuration keys: their kinds of values, and whether each is active, inert or
not built.

It holds the keys of DeepSpeed's JSON dialect, which Accelerate and the Trainer write, and our own.
Any other key is an error, whose message suggests the key that was likely meant.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from hf_zero.config.feature_rows import SECTIONS as OF_FEATURES
from hf_zero.config.offload import OFFLOAD_ALIASES
from hf_zero.config.sections import TENSOR_ALIASES
from hf_zero.config.settings import Settings
from hf_zero.config.sourced import value_at
from hf_zero.config.value_types import (
    BOOLEAN,
    COUNT,
    DTYPE,
    NAMES,
    SECTION,
    SIZE,
    TEXT,
    Key,
    Status,
    choice,
    declared_keys,
    enabled,
    never,
    number,
    spellings,
)
from hf_zero.logging import JsonObject

TABLE = Path(__file__).with_suffix(".toml")
TOP_LEVEL = "top level"  # the table of keys outside of sections
VALUE_TYPES = {
    "boolean": BOOLEAN, "count": COUNT, "dtype": DTYPE, "names": NAMES, "number": number(0),
    "section": SECTION, "size": SIZE, "text": TEXT,
}  # fmt: skip
STATUSES = {"active": Status.ACTIVE, "inert": Status.INERT, "not_built": Status.NOT_BUILT}
SECTION_OFF = '{"enabled": false}'

Entry = str | JsonObject


def read(text: str) -> dict[str, Entry]:
    """Return the entries of ``keys.toml`` by the paths of their keys."""
    return {
        name if section == TOP_LEVEL else f"{section}.{name}": entry
        for section, entries in tomllib.loads(text).items()
        for name, entry in entries.items()
    }


def with_note(key: Key, entries: Mapping[str, Entry]) -> Key:
    """Return the key of a field with the sentence of its entry."""
    assert key.path in entries, f"{key.path}: write what it sets into hf_zero/config/keys.toml"
    entry = entries[key.path]
    if isinstance(entry, str):
        return replace(key, note=entry)
    return replace(key, note=entry["inert"], status=Status.INERT)


def without_field(path: str, entry: JsonObject) -> Key:
    """Return the key of an entry that no field of :class:`Settings` declares."""
    status = next(STATUSES[word] for word in STATUSES if word in entry)
    note = entry[status.value.replace(" ", "_")]
    kind = entry.get("kind", "boolean")
    if isinstance(kind, list):
        return Key(path, choice(*kind), status, note)
    if status is not Status.NOT_BUILT:
        asks = bool if entry.get("lacks") else never
        return Key(path, VALUE_TYPES[kind], status, note, asks=asks)
    key = Key(path, VALUE_TYPES[kind], status, note, instead=entry.get("instead", ""))
    if kind == "section":
        members = entry.get("members")
        off = entry.get("off", SECTION_OFF)
        names = frozenset((*members, "enabled")) if members else None
        return replace(key, asks=asks_for_section(off, entry), off=off, members=names)
    off = entry.get("off", "false")
    default = json.loads(off)
    return replace(key, asks=lambda value: value != default, off=off, default=default)


def asks_for_section(off: str, entry: JsonObject) -> Callable[[Mapping[str, object]], bool]:
    """Return whether the value of a section asks for its feature: a number above 1 of the member
    ``above_one``, else any content where "null" is off, else a switch that is on.
    """

    def asks(section: Mapping[str, object]) -> bool:
        if section.get("enabled") is False:
            return False
        if member := entry.get("above_one"):
            value = value_at(section, member)
            return isinstance(value, (int, float)) and value > 1
        return bool(section) if off == "null" else enabled(section)

    return asks


_ENTRIES = read(TABLE.read_text("utf-8"))
_FIELDS = {key.path: with_note(key, _ENTRIES) for key in declared_keys(Settings)}

KEYS: dict[str, Key] = _FIELDS | {
    path: without_field(path, entry)
    for path, entry in _ENTRIES.items()
    if path not in _FIELDS and isinstance(entry, dict)
}

# Keys with a value "auto" of their own, which Accelerate and the Trainer do not fill in.
OWN_AUTOS: frozenset[str] = frozenset(
    ("kernels", "attention_backend", "zero_optimization.offload_optimizer.ratio")
)

# Keys and sections of the features whose pages are marked experimental.
EXPERIMENTAL = (
    *("tensor_parallel", "sequence_parallel_size", "context_parallel_size", "tiled_mlp"),
    *("expert_parallel", "pipeline", "compressed_communication", "zero_optimization.zeropp"),
    *("zero_optimization.zero_quantized", "zero_optimization.zero_hpz", "zero_optimization.mics"),
    *("replicate_size", "progressive_layer_drop", "quantize_training", "compression_training"),
    *("quantization_aware_training", "training_phases", "curriculum_learning", "data_efficiency"),
    *("float8_training", "checkpoint.memory"),
)


def is_experimental(path: str) -> bool:
    """Return whether any version may change the key ``path``."""
    return path.startswith(EXPERIMENTAL) and KEYS[path].status is Status.ACTIVE


_STAGE3_FIELDS = (
    "prefetch_bucket_size param_persistence_threshold model_persistence_threshold "
    "max_live_parameters max_reuse_distance module_granularity_threshold "
    "use_all_reduce_for_fetch_params allgather_sequential gather_16bit_weights_on_model_save"
)

# Alternative spellings: DeepSpeed's former names, the names of its Python fields, and our own
# keywords.
ALIASES: dict[str, str] = {
    "bfloat16": "bf16",
    "bf16.check_overflow": "bf16.check_grad_overflow",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    **{
        f"zero_optimization.{name}": f"zero_optimization.stage3_{name}"
        for name in _STAGE3_FIELDS.split()
    },
    "prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    **{each.FIELD: each.SECTION_PATH for each in OF_FEATURES if each.FIELD != each.SECTION_PATH},
    **spellings(Settings),
    **OFFLOAD_ALIASES,
    **{name: path for each in OF_FEATURES for name, path in each.SPELLINGS.items()},
    **TENSOR_ALIASES,
    "checkpoint.writer.decoupled": "checkpoint.async_save",
    "flops_profiler.step": "flops_profiler.profile_step",
}

LOSS_SCALE_KEYS = (
    "loss_scale", "loss_scale_window", "initial_scale_power", "hysteresis", "min_loss_scale",
    "auto_cast",
)  # fmt: skip

# Names that people write, by their lower-case form: what to write instead.
ANSWERS: dict[str, str] = {
    **{
        name: f"it is a parameter of the optimizer: write optimizer.params.{param} beside "
        "optimizer.type, or give it to the optimizer that the script makes"
        for name, param in (("lr", "lr"), ("learning_rate", "lr"), ("weight_decay", "weight_decay"))
    },
    "per_device_train_batch_size": "it is an argument of the Trainer; write "
    "train_micro_batch_size_per_gpu here",
    "per_gpu_train_batch_size": "write train_micro_batch_size_per_gpu",
    "max_grad_norm": "write gradient_clipping",
    **dict.fromkeys(
        ("num_train_epochs", "max_steps", "lr_scheduler_type", "warmup_steps", "warmup_ratio"),
        "it is an argument of the Trainer, and belongs into TrainingArguments",
    ),
    **dict.fromkeys(
        ("fp8", "float8", "fp8_config"),
        "write float8_training: {recipe: tensorwise}, which multiplies matrices in float8",
    ),
    "compile.disable": "blocks are compiled only with compile: blocks; remove it",
    "mixed_precision": "write bf16: {enabled: true} or fp16: {enabled: true}",
    **dict.fromkeys(
        [f"bf16.{name}" for name in LOSS_SCALE_KEYS],
        "bf16 has the range of fp32 and needs no loss scale; remove it",
    ),
    **dict.fromkeys(
        ("fp16.opt_level", "fp16.fp16_opt_level"), "it is Apex's, not DeepSpeed's; remove it"
    ),
    "fsdp_config": "`hf-zero migrate` translates an Accelerate configuration for FSDP",
}

# Names that other libraries have for keys: their effect would be lost without a word.
MEANT: dict[str, str] = {
    **dict.fromkeys(("fsdp", "zero"), "zero_optimization"),
    "zero_stage": "stage",
    **dict.fromkeys(("float16", "half"), "fp16"),
    "gradient_checkpointing": "activation_checkpointing",
    "batch_size": "train_batch_size",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    **dict.fromkeys(("grad_clip", "clip_grad", "clip_grad_norm"), "gradient_clipping"),
}

SECTIONS: frozenset[str] = frozenset(
    path[:dot] for path in (*KEYS, *ALIASES) for dot in range(len(path)) if path[dot] == "."
)
