"""``hf-zero train``: a training that a YAML file describes, and the script that it stands for."""

from __future__ import annotations

import shlex
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_zero.cli.printing import AsJson, print_json
from hf_zero.errors import ConfigError
from hf_zero.logging import JsonObject

if TYPE_CHECKING:
    from hf_zero.config.training_file import TrainingFile

MODEL, DATA = "Qwen/Qwen2.5-0.5B", {"dpo": "trl-lib/ultrafeedback_binarized"}
TEXT_DATA = "wikimedia/wikipedia"
# By task: learning rates of all parameters and of adapters, tokens of a row
RATES = {"sft": (2e-5, 2e-4), "dpo": (1e-6, 1e-5), "pretrain": (2e-5, 2e-4)}
QUESTIONS = ("task", "model", "dataset", "adapters", "preset")

File = Annotated[str, typer.Argument(help="The YAML file of a training.")]
Script = Annotated[
    bool,
    typer.Option("--script", help="Print the script that the file stands for, and do not train."),
]
Init = Annotated[bool, typer.Option("--init", help="Write FILE from five questions, and stop.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="With --init: take the defaults.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue from the newest checkpoint in output_dir.")
]


def train(
    file: File,
    script: Script = False,
    init: Init = False,
    yes: Yes = False,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Train a language model as a YAML file says: supervised fine-tuning, DPO or pretraining, of
    all parameters, with LoRA or with QLoRA.

    The file names a task, a model, a dataset, adapters and a preset of ZeRO; `hf-zero docs train`
    lists all keys. The command writes a script for TRL into output_dir and starts its ranks on this
    machine. With --json, print the script and its command without running them.

    Example: hf-zero train sft.yaml
    """
    from hf_zero.cli.launch import request_of_training, start_ranks
    from hf_zero.config.training_file import read_training_file
    from hf_zero.config.variables import warn_once
    from hf_zero.integrations.datasets.training_data import refuse_unread_data
    from hf_zero.integrations.transformers.training_names import refuse_unknown_names
    from hf_zero.launch.training_script import (
        RESUME,
        SCRIPT,
        launch_command,
        resolved,
        training_script,
    )

    if yes and not init:
        raise ConfigError("--yes answers the questions of --init; leave it out")
    if init:
        _refuse_beside("--init only writes the file", {"--script": script, "--resume": resume})
        _init(file, yes, as_json)
        return
    if script:
        _refuse_beside("--script only prints it", {"--resume": resume, "--json": as_json})
    training = resolved(read_training_file(file))
    text, target = training_script(training), Path(training.output_dir) / SCRIPT
    arguments = [RESUME] if resume else []
    if script:
        print(text, end="")
        return
    if as_json:
        command = launch_command(training, str(target), *arguments)
        print_json({"script": text, "command": command})
        return
    _refuse_missing(training)
    _refuse_checkpoints(training.output_dir, resume)
    refuse_unknown_names(training)
    refuse_unread_data(training)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"output_dir: {target} cannot be written ({error.strerror}); name another folder"
        ) from None
    print(
        f"the script: {target}; `hf-zero top {shlex.quote(training.output_dir)}` shows the run",
        flush=True,
    )
    if training.parity is not None and not resume:
        from hf_zero.cli.parity import DIFFERENT, Compared, compare

        request = request_of_training(training, str(target))
        if not compare(request, Compared(steps=training.parity)):
            raise typer.Exit(DIFFERENT)
    warn_once()
    start_ranks(request_of_training(training, str(target), *arguments))


def _refuse_beside(what: str, options: dict[str, bool]) -> None:
    """Raise ConfigError for the first of ``options`` that was passed beside the one that does
    ``what``.
    """
    for option, passed in options.items():
        if passed:
            raise ConfigError(f"{what}; leave {option} out")


def _refuse_missing(training: TrainingFile) -> None:
    """Raise ConfigError if a library or a device that the script needs is missing."""
    from hf_zero.config.training_file import QLORA
    from hf_zero.device import kinds

    packages = {"trl": "'hf-zero[trl]'"}
    packages |= {"peft": "'hf-zero[peft]'"} if training.adapters != "none" else {}
    packages |= {"bitsandbytes": "bitsandbytes"} if training.adapters == QLORA else {}
    missing = [package for library, package in packages.items() if find_spec(library) is None]
    if missing:
        raise ConfigError(f"this training needs pip install {' '.join(missing)}")
    if training.adapters == QLORA and not kinds.device_count():
        raise ConfigError(
            "adapters: qlora needs a GPU, for the 4-bit kernels of bitsandbytes, and there is "
            "none; write adapters: lora"
        )


def _refuse_checkpoints(folder: str, resume: bool) -> None:
    """Raise ConfigError if ``folder`` has checkpoints that the run would mix with its own, or none
    to resume from.
    """
    checkpoints = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
    if checkpoints and not resume:
        raise ConfigError(
            f"{folder} has checkpoints of an earlier run ({', '.join(checkpoints[:3])}); pass "
            "--resume to continue it, or name another output_dir"
        )
    if resume and not checkpoints:
        raise ConfigError(f"--resume: {folder} has no checkpoint; leave --resume out to begin")


def _init(file: str, yes: bool, as_json: bool) -> None:
    """Write a training file from the answers to five questions, or from their defaults."""
    from hf_zero.config.files import refuse_existing, write_new
    from hf_zero.config.training_file import KEYS

    refuse_existing(file, "to --init")
    answers: dict[str, str] = {}
    for name in QUESTIONS:
        default = _default(name, answers)
        if yes:
            answers[name] = default
            continue
        print(f"{name}: {KEYS[name].note}")
        try:
            answers[name] = typer.prompt(name, default, value_proc=partial(_answer, name))
        except typer.Abort:
            raise ConfigError("a question has no answer; pass --yes for the defaults") from None
    write_new(Path(file), _initial(file, answers), "to --init")
    if as_json:
        print_json({"file": file, "answers": answers})
        return
    trains = f"hf-zero train {shlex.quote(file)}"
    print(f"written: {file}; `{trains}` trains, with --script it prints the script")


def _answer(name: str, value: str) -> str:
    """Return the answer to the question ``name``; typer asks again after BadParameter."""
    from hf_zero.config.training_file import KEYS

    try:
        return str(KEYS[name].value_type.convert(value))
    except ValueError:
        raise typer.BadParameter(f"{value!r} is not {KEYS[name].value_type.expected}") from None


def _default(name: str, answers: dict[str, str]) -> str:
    task = answers.get("task", "sft")
    return {
        "task": "sft",
        "model": MODEL,
        "dataset": TEXT_DATA if task == "pretrain" else DATA.get(task, "trl-lib/Capybara"),
        "adapters": "none" if task == "pretrain" else "lora",
        "preset": "zero2",
    }[name]


def _initial(file: str, answers: dict[str, str]) -> str:
    """Return the text of a new training file."""
    from hf_zero.config.files import yaml_line
    from hf_zero.config.training_file import KEYS

    rate = RATES[answers["task"]][answers["adapters"] != "none"]
    wiki = answers["dataset"] == TEXT_DATA
    values: JsonObject = {
        **answers,
        **({"dataset_config": "20231101.simple"} if wiki else {}),
        "precision": "auto",  # the file may travel to a machine with a GPU
        "output_dir": f"runs/{Path(file).stem}",
        "learning_rate": rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.05,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "max_length": 1024,
        "num_train_epochs": 1,
        "eval_fraction": 0.01,
        "logging_steps": 10,
        "save_steps": 500,
    }
    lines = [f"# hf-zero train {shlex.quote(file)}", "# `hf-zero docs train` lists all keys."]
    lines += [
        f"{name}: {yaml_line(value) if isinstance(value, str) else value}  # {KEYS[name].note}"
        for name, value in values.items()
    ]
    return "\n".join(lines) + "\n"
