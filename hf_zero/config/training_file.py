"""Files of ``hf-zero train``: the table of their keys, their reader and their JSON schema."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from glob import glob
from pathlib import Path

from hf_zero.config import PRESETS, ZeroConfig
from hf_zero.config.files import load_file
from hf_zero.config.reading import ConfigReading
from hf_zero.config.schema import DRAFT
from hf_zero.config.sourced import flattened, merge, value_at
from hf_zero.config.spelling import did_you_mean
from hf_zero.config.value_types import (
    BOOLEAN,
    COUNT,
    SECTION,
    TEXT,
    Key,
    ValueType,
    choice,
    integer,
    key,
    number,
    placed,
)
from hf_zero.errors import ConfigError
from hf_zero.logging import JsonObject

SFT, DPO, PRETRAIN = "sft", "dpo", "pretrain"
LORA, QLORA = "lora", "qlora"
FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
"""Formats of ``datasets.load_dataset`` by the suffix of a file."""
COLUMNS = ("messages", "text", "prompt", "completion", "chosen", "rejected")
EXAMPLE = "task: sft, or let `hf-zero train --init` write a file"
STEPS_OR_SHARE = "in steps, or below 1 as a share of the run"


def _modules(value: object) -> str | list[str]:
    """Convert the name of one kind of module, or of several."""
    if isinstance(value, list) and value:
        return [TEXT.convert(item) for item in value]
    return str(TEXT.convert(value))


_TEXTS = {"type": "array", "items": dict(TEXT.schema), "minItems": 1}
MODULES = ValueType("a name or a list of names", _modules, {"anyOf": [dict(TEXT.schema), _TEXTS]})
SOME, ANY = number(above=0), number(0)


def _steps(value: object) -> float:
    amount = float(SOME.convert(value))
    if amount > 1 and not amount.is_integer():
        raise ValueError(value)
    return int(amount) if amount >= 1 else amount


def _warmup(value: object) -> float:
    return 0 if ANY.convert(value) == 0 else _steps(value)


def _part(value: object) -> float:
    part = float(SOME.convert(value))
    if part >= 1:
        raise ValueError(value)
    return part


STEPS = ValueType("a number of steps, or a share of the run below 1", _steps, dict(SOME.schema))
WARMUP = ValueType("0, a number of steps, or a share of the run below 1", _warmup, dict(ANY.schema))
PART = ValueType("a number above 0 and below 1", _part, {**SOME.schema, "exclusiveMaximum": 1})


@dataclass(frozen=True, kw_only=True)
class TrainerArguments:
    """Arguments of TRL's trainers under their own names; None takes the trainer's default."""

    output_dir: str = key(
        TEXT, None, "folder of checkpoints, figures, the script and the trained model"
    )
    max_steps: int | None = key(integer(1), None, "steps of the run, in place of num_train_epochs")
    num_train_epochs: float | None = key(SOME, None, "passes over the data")
    learning_rate: float | None = key(SOME, None, "largest learning rate")
    lr_scheduler_type: str | None = key(TEXT, None, "schedule of the learning rate, such as cosine")
    warmup_steps: float | None = key(WARMUP, None, f"length of the warmup, {STEPS_OR_SHARE}")
    weight_decay: float | None = key(number(0), None, "weight decay of AdamW")
    max_grad_norm: float | None = key(number(0), None, "gradient norm above which it is clipped")
    per_device_train_batch_size: int | None = key(integer(1), None, "samples of a rank at a time")
    gradient_accumulation_steps: int | None = key(integer(1), None, "micro-batches of a step")
    gradient_checkpointing: bool | None = key(
        BOOLEAN, None, "recompute activations in the backward"
    )
    max_length: int | None = key(integer(1), None, "tokens of a sample; longer ones are cut")
    packing: bool | None = key(BOOLEAN, None, "put several samples into a row; sft only")
    beta: float | None = key(SOME, None, "weight of the reference model; dpo only")
    eval_steps: float | None = key(STEPS, None, f"interval of evaluations, {STEPS_OR_SHARE}")
    logging_steps: float | None = key(STEPS, None, f"interval of log lines, {STEPS_OR_SHARE}")
    save_steps: float | None = key(STEPS, None, f"interval of checkpoints, {STEPS_OR_SHARE}")
    save_total_limit: int | None = key(integer(1), None, "checkpoints to keep, the newest ones")
    report_to: str | list[str] | None = key(MODULES, None, "trackers, such as wandb or tensorboard")
    seed: int | None = key(COUNT, None, "seed of the order of samples and of new weights")


@dataclass(frozen=True, kw_only=True)
class TrainingFile(TrainerArguments):
    """One training: task, model, dataset, adapters, a preset of ZeRO, and trainer arguments."""

    task: str = key(
        choice(SFT, DPO, PRETRAIN),
        None,
        "sft (conversations, prompts with completions), dpo (preferred answers), pretrain (text)",
        required=True,
    )
    model: str = key(TEXT, None, "a model on the Hub, or its folder", required=True)
    dataset: str = key(
        TEXT, None, f"a dataset on the Hub, or a file ({', '.join(FORMATS)})", required=True
    )
    dataset_config: str | None = key(TEXT, None, "configuration of the dataset on the Hub")
    split: str = key(TEXT, "train", "split to train on")
    eval_split: str | None = key(TEXT, None, "split to evaluate on")
    eval_fraction: float | None = key(PART, None, "share of the split to evaluate on instead")
    columns: dict[str, str] = key(
        SECTION,
        None,
        f"the dataset's columns by the names that the trainer reads: {', '.join(COLUMNS)}",
        default_factory=dict,
    )
    weights: str = key(
        choice("pretrained", "random"), "pretrained", "random: train a new model of this shape"
    )
    adapters: str = key(
        choice("none", LORA, QLORA),
        "none",
        "none (all parameters are trained), lora, or qlora (LoRA on a base of 4 bits)",
    )
    lora_r: int = key(integer(1), 16, "rank of the adapters")
    lora_alpha: float = key(SOME, 32, "scale of the adapters, times lora_r")
    lora_dropout: float = key(number(0, 1), 0.05, "dropout before the adapters")
    lora_target_modules: str | list[str] = key(
        MODULES, "all-linear", "modules with adapters, by the end of their names"
    )
    preset: str = key(choice(*PRESETS), "zero2", f"stage of ZeRO: {', '.join(PRESETS)}")
    precision: str = key(
        choice("auto", "bf16", "fp16", "fp32"),
        "bf16",
        "precision of the computation: bf16, fp16, fp32; auto: bf16 on a GPU, else fp32",
    )
    ranks: int | None = key(
        integer(1), None, "ranks on this machine; without it the number of GPUs, else 2"
    )
    parity: int | None = key(
        integer(1),
        None,
        "steps to compare with untouched torch before the run, which a difference prevents",
    )
    config: JsonObject = key(
        SECTION,
        None,
        "other keys of hf-zero's configuration, such as zero_optimization.offload_optimizer",
        default_factory=dict,
    )
    written: tuple[str, ...] = field(default=(), compare=False)
    """Keys in the file."""

    def trainer_arguments(self) -> dict[str, object]:
        """Return the arguments of the trainer that the file has, by name."""
        names = [item.name for item in fields(TrainerArguments)]
        return {
            name: getattr(self, name) for name in names if name in {"output_dir", *self.written}
        }

    def zero_keys(self) -> Iterator[tuple[str, object]]:
        """Yield the dotted paths and values of keys of the ZeRO configuration beside the preset:
        those of ``config``, and of the figures for ``hf-zero report``.
        """
        off = value_at(self.config, "metrics.enabled") not in (None, True)
        metrics = {} if off else {"enabled": True, "path": self.output_dir}
        for path, value in flattened(merge({"metrics": metrics}, self.config)):
            if not isinstance(value, dict):
                yield path, value


KEYS: dict[str, Key] = {each.path: each for each in placed(TrainingFile, "", "")}
REQUIRED = ("task", "model", "dataset")
PATHS = ("output_dir", "model", "dataset")
"""Keys whose value may be a path; the command and the trainer expand ``~`` alike."""
_ADAPTER_KEYS = tuple(name for name in KEYS if name.startswith("lora_"))


def json_schema() -> str:
    """Return the JSON schema of these files as text."""
    schema = {
        "$schema": DRAFT,
        "$id": "urn:hf-zero:training",
        "title": "hf-zero train",
        "type": "object",
        "additionalProperties": False,
        "required": list(REQUIRED),
        "properties": {
            path: {
                **row.value_type.schema,
                "description": row.note,
                **({} if row.default is None else {"default": row.default}),
            }
            for path, row in sorted(KEYS.items(), key=lambda item: item[0] not in REQUIRED)
        },
    }
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def table() -> str:
    """Return a Markdown table of the keys."""
    lines = ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    for path, row in KEYS.items():
        default = "" if row.default is None else f"`{row.default}`"
        lines.append(f"| `{path}` | {row.value_type.expected} | {default} | {row.note} |")
    return "\n".join(lines)


def read_training_file(path: str | os.PathLike[str]) -> TrainingFile:
    """Return the training that the YAML or JSON file at ``path`` describes.

    Raises ConfigError with all mistakes in the file: unknown keys, wrong values, keys without an
    effect, files that do not exist.
    """
    name = os.fspath(path)
    if os.path.isdir(name):
        raise ConfigError(f"{name} is a folder; pass the YAML file of a training")
    if not os.path.isfile(name):
        raise ConfigError(f"{name} is no file; `hf-zero train --init {name}` writes one to change")
    label, reading = f"config file {name}", ConfigReading()
    written = {key: value for key, value in load_file(name, EXAMPLE).items() if value is not None}
    if {"distributed_type", "deepspeed_config", "zero_optimization"} & written.keys():
        raise ConfigError(
            f"{label} configures ZeRO, not a training: `hf-zero launch --config` takes it with a "
            "script; `hf-zero train --init train.yaml` writes a file that needs none"
        )
    for written_key, value in written.items():
        if written_key in KEYS:
            reading.put(written_key, value, written_key, label, KEYS)
        else:
            hint = did_you_mean(str(written_key), KEYS)
            reading.mistakes.add(f"{label}: unknown key {str(written_key)!r:.200}{hint}")
    for missing in [each for each in REQUIRED if each not in written]:
        reading.mistakes.add(f"{label}: {missing} is missing; write {missing}: {_example(missing)}")
    # the reading keeps "auto" apart as a value that a library fills in; this key means it
    own_autos = reading.autos & {"precision"}
    for auto in sorted((reading.autos & KEYS.keys()) - own_autos):
        reading.mistakes.add(
            f'{label}: {auto} = "auto" is not {KEYS[auto].value_type.expected}; remove it'
        )
    reading.mistakes.throw()
    values = {"output_dir": f"runs/{Path(name).stem}", **reading.given()}
    values |= dict.fromkeys(own_autos, "auto")
    values |= {path: os.path.expanduser(values[path]) for path in PATHS}
    training = TrainingFile(**values, written=tuple(reading.values))
    for contradiction in _contradictions(training):
        reading.mistakes.add(f"{label}: {contradiction}")
    with reading.mistakes.collect():
        _check_config(training, label)
    reading.mistakes.throw()
    return training


def _example(name: str) -> str:
    return KEYS[name].value_type.expected if name == "task" else KEYS[name].note


def _contradictions(training: TrainingFile) -> Iterator[str]:
    """Yield what in the file excludes something else in it, has no effect, or does not exist."""
    written = {*training.written}
    for one, other in (("eval_split", "eval_fraction"), ("max_steps", "num_train_epochs")):
        if {one, other} <= written:
            yield f"{one} and {other} exclude each other; keep one"
    if "eval_steps" in written and not {"eval_split", "eval_fraction"} & written:
        yield "eval_steps has no data to evaluate on; write eval_fraction: 0.01, or eval_split"
    for name, task in (("packing", SFT), ("beta", DPO)):
        if name in written and training.task != task:
            yield f"{name} has no effect with task: {training.task}; remove it"
    if training.adapters == "none":
        idle = [name for name in _ADAPTER_KEYS if name in written]
        if idle:
            yield f"{idle[0]} has no effect without adapters; write adapters: lora, or remove it"
    if training.weights == "random" and (training.task != PRETRAIN or training.adapters != "none"):
        yield (
            "weights: random needs task: pretrain without adapters; write weights: pretrained, or "
            "pretrain first"
        )
    for column in [name for name in training.columns if name not in COLUMNS]:
        yield f"columns: the trainer reads no {column!r}{did_you_mean(column, COLUMNS)}"
    for column, name in training.columns.items():
        if not isinstance(name, str):
            yield f"columns: {column} = {name} is not the name of a column; write a text"
    names = [*training.columns.values()]
    for column in dict.fromkeys(name for name in names if names.count(name) > 1):
        yield f"columns: {column} is named twice; name another column of the dataset"
    if os.path.isfile(training.dataset) and Path(training.dataset).suffix not in FORMATS:
        suffixes = ", ".join(FORMATS)
        yield f"dataset: {training.dataset} has none of the suffixes {suffixes}; rename it"
    if Path(training.dataset).suffix in FORMATS and not glob(training.dataset):
        yield f"there is no file {training.dataset}; write the path of one, or a name of the Hub"
    if os.path.isfile(training.model):
        yield f"model: {training.model} is a file; write a model's folder, or a name of the Hub"
    elif training.model.startswith(("/", "./", "../")) and not os.path.isdir(training.model):
        yield f"there is no folder {training.model}; write that of a model, or a name of the Hub"


def _check_config(training: TrainingFile, label: str) -> None:
    """Raise ConfigError for keys of ``config`` that a ZeRO configuration does not have, or that
    other keys of the file set.
    """
    for name, other in (("bf16", "precision"), ("fp16", "precision")):
        if name in training.config:
            raise ConfigError(f"{label}: config.{name}: write {other}: {name} in place of it")
    zero = training.config.get("zero_optimization", {})
    if isinstance(zero, dict) and "stage" in zero:
        raise ConfigError(f"{label}: config.zero_optimization.stage: preset names it; remove this")
    whole: JsonObject = {"zero_optimization": {"stage": PRESETS[training.preset]}}
    ZeroConfig.from_dict(merge(whole, training.config), source=f"{label}: config", allow_auto=True)
