"""The script of a training file: TRL's trainers and PEFT, without an import of hf-zero, and the
command that starts its ranks.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_zero.config.files import yaml_line
from hf_zero.config.training_file import DPO, FORMATS, LORA, PRETRAIN, QLORA, TrainingFile
from hf_zero.device import kinds

SCRIPT = "train.py"
RESUME = "--resume"
NAMES = {DPO: "DPO", PRETRAIN: "SFT"}  # trainers of TRL by task
VERBS = {DPO: "Train {} on preferences of {}", PRETRAIN: "Train {} on the text of {}"}


def resolved(training: TrainingFile) -> TrainingFile:
    """Return ``training`` with the precision that this machine decides."""
    if training.precision != "auto":
        return training
    return replace(training, precision="bf16" if kinds.device_count() else "fp32")


def launch_options(training: TrainingFile) -> dict[str, Any]:
    """Return the options of ``hf-zero launch`` for the ranks of ``training``, by name."""
    pairs = [f"{path}={yaml_line(value)}" for path, value in training.zero_keys()]
    options = {"preset": training.preset, "precision": training.precision, "set": pairs}
    return options | ({"ranks": training.ranks} if training.ranks is not None else {})


def launch_command(training: TrainingFile, script: str = SCRIPT, *arguments: str) -> str:
    """Return the command that starts the ranks of ``training``; ``arguments``: the script's."""
    words = ["hf-zero", "launch"]
    for name, value in launch_options(training).items():
        for item in value if isinstance(value, list) else [value]:
            words += [f"--{name}", str(item)]
    return shlex.join([*words, script, *arguments])


def training_script(training: TrainingFile) -> str:
    """Return the text of the script that trains as ``training`` says."""
    trainer = NAMES.get(training.task, "SFT")
    adapters = training.adapters != "none"
    names = ["AutoModelForCausalLM", "AutoTokenizer"]
    names += ["AutoConfig"] if training.weights == "random" else []
    names += ["BitsAndBytesConfig"] if training.adapters == QLORA else []
    imports = [
        "import sys",
        "",
        "import torch",
        "from datasets import load_dataset",
        *(["from peft import LoraConfig"] if adapters else []),
        f"from transformers import {', '.join(sorted(names))}",
        f"from trl import {trainer}Config, {trainer}Trainer",
    ]
    return "\n".join(
        [
            *_docstring(training, trainer),
            "",
            *imports,
            "",
            f"MODEL = {_literal(training.model)}",
            "",
            "# before the model, which at stage 3 is then read into shards",
            *_call("args", f"{trainer}Config", _arguments(training)),
            *_data(training),
            "tokenizer = AutoTokenizer.from_pretrained(MODEL)",
            *_model(training),
            *_call("trainer", f"{trainer}Trainer", _parts(training)),
            f"trainer.train(resume_from_checkpoint={_literal(RESUME)} in sys.argv)",
            *_card(training),
            "trainer.save_model()" + ("  # the adapters" if adapters else ""),
            "",
        ]
    )


def _card(training: TrainingFile) -> list[str]:
    """Return the lines that name a dataset of the Hub in the model card, which is published: no
    file or folder of this machine.
    """
    data = Path(training.dataset)
    if data.exists() or data.is_absolute():
        return []
    names = {"model_name": Path(training.output_dir).name, "dataset_name": training.dataset}
    arguments = ", ".join(f"{name}={_literal(value)}" for name, value in names.items())
    return [f"trainer.create_model_card({arguments})"]


def _docstring(training: TrainingFile, trainer: str) -> list[str]:
    what = VERBS.get(training.task, "Fine-tune {} on {}").format(training.model, training.dataset)
    lora = {LORA: " and LoRA adapters", QLORA: " and LoRA adapters on a base of 4 bits"}
    summary = f"{what} with TRL's {trainer}Trainer{lora.get(training.adapters, '')}."
    return ['r"""' + summary.replace('"', "'"), "", launch_command(training), '"""']


def _arguments(training: TrainingFile) -> dict[str, str]:
    """Return the arguments of the trainer's configuration, by name, as Python."""
    evaluates = training.eval_split or training.eval_fraction
    values: dict[str, Any] = {
        **training.trainer_arguments(),
        "bf16": training.precision == "bf16",
        "fp16": training.precision == "fp16",
        **({"packing": True, "packing_strategy": "wrapped"} if training.task == PRETRAIN else {}),
        **({"eval_strategy": "steps" if training.eval_steps else "epoch"} if evaluates else {}),
    }
    literals = {name: _literal(value) for name, value in values.items()}
    return {**literals, "use_cpu": "not torch.accelerator.is_available()"}


def dataset_arguments(training: TrainingFile) -> tuple[list[str], dict[str, str]]:
    """Return the arguments of ``datasets.load_dataset`` beside the split, by place and by name."""
    file = FORMATS.get(Path(training.dataset).suffix)
    positional = [file or training.dataset]
    positional += [training.dataset_config] if training.dataset_config else []
    return positional, {"data_files": training.dataset} if file else {}


def _data(training: TrainingFile) -> list[str]:
    """Return the lines that bind ``data`` and, with an evaluation, ``held_out``."""
    positional, named = dataset_arguments(training)
    source = [*map(_literal, positional)]
    source += [f"{name}={_literal(value)}" for name, value in named.items()]
    shape = ""
    if training.columns:
        renamed = {theirs: ours for ours, theirs in training.columns.items() if ours != theirs}
        shape = f".select_columns({_literal([*training.columns.values()])})"
        shape += f".rename_columns({_literal(renamed)})" if renamed else ""
    splits = {"data": training.split, "held_out": training.eval_split}
    lines = [
        f"{name} = load_dataset({', '.join([*source, f'split={_literal(split)}'])}){shape}"
        for name, split in splits.items()
        if split
    ]
    if training.eval_fraction:
        split = f"data.train_test_split({training.eval_fraction}, seed=args.seed)"
        lines += [f"parts = {split}", 'data, held_out = parts["train"], parts["test"]']
    return lines


def _model(training: TrainingFile) -> list[str]:
    """Return the lines that bind ``model``."""
    if training.weights == "random":
        config = "AutoConfig.from_pretrained(MODEL)"
        return [
            "torch.manual_seed(args.seed)",
            f"model = AutoModelForCausalLM.from_config({config}, dtype=torch.float32)",
        ]
    if training.adapters != QLORA:
        return ["model = AutoModelForCausalLM.from_pretrained(MODEL)"]
    bits = {
        "load_in_4bit": "True",
        "bnb_4bit_quant_type": '"nf4"',
        "bnb_4bit_use_double_quant": "True",
        "bnb_4bit_compute_dtype": "torch.bfloat16",
    }
    return [
        *_call("base", "BitsAndBytesConfig", bits),
        "model = AutoModelForCausalLM.from_pretrained(MODEL, quantization_config=base)",
    ]


def _parts(training: TrainingFile) -> dict[str, str]:
    """Return the arguments of the trainer, by name, as Python."""
    parts = {"model": "model", "args": "args", "train_dataset": "data"}
    if training.task == DPO and training.adapters == "none":
        parts["ref_model"] = "AutoModelForCausalLM.from_pretrained(MODEL)"
    if training.eval_split or training.eval_fraction:
        parts["eval_dataset"] = "held_out"
    parts["processing_class"] = "tokenizer"
    if training.adapters != "none":
        options: Mapping[str, object] = {
            "r": training.lora_r,
            "lora_alpha": training.lora_alpha,
            "lora_dropout": training.lora_dropout,
            "target_modules": training.lora_target_modules,
            "task_type": "CAUSAL_LM",
        }
        arguments = ", ".join(f"{name}={_literal(value)}" for name, value in options.items())
        parts["peft_config"] = f"LoraConfig({arguments})"
    return parts


def _call(name: str, called: str, arguments: Mapping[str, str]) -> list[str]:
    lines = [f"    {name}={value}," for name, value in arguments.items()]
    return [f"{name} = {called}(", *lines, ")"]


def _literal(value: object) -> str:
    """Return ``value`` as Python with double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_literal(k)}: {_literal(v)}' for k, v in value.items())}}}"
    return repr(value)
