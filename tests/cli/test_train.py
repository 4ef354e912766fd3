"""``hf-zero train``: its files, the scripts that they stand for, and what it refuses."""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import trl
import yaml
from typer.testing import CliRunner

from hf_zero.cli import main
from hf_zero.cli import train as command
from hf_zero.cli.app import app
from hf_zero.config import PRESETS
from hf_zero.config.training_file import (
    KEYS,
    TrainerArguments,
    json_schema,
    read_training_file,
)
from hf_zero.launch.training_script import launch_command, training_script
from tests.cli.invoked import invoke, refusal

LEAST = {"task": "sft", "model": "org/model", "dataset": "org/data"}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write ``train.yaml`` with keys beside the required ones; return its path."""
    monkeypatch.chdir(tmp_path)

    def written(**keys: Any) -> str:
        values = {name: value for name, value in (LEAST | keys).items() if value is not None}
        Path("train.yaml").write_text(yaml.safe_dump(values))
        return "train.yaml"

    return written


CARD = "trainer.create_model_card"
SCRIPTS: list[dict[str, Any]] = [
    {},
    {"adapters": "lora", "lora_target_modules": ["q_proj", "v_proj"], "packing": True},
    {"adapters": "qlora", "eval_split": "test", "precision": "fp16", "preset": "zero3"},
    {"task": "dpo", "beta": 0.2, "eval_fraction": 0.1, "eval_steps": 20, "seed": 3},
    {"task": "dpo", "adapters": "lora", "columns": {"prompt": "question", "chosen": "chosen"}},
    {"task": "pretrain", "weights": "random", "dataset_config": "en", "preset": "zero3"},
    {"output_dir": 'a\'b "c"', "report_to": ["wandb"], "max_steps": 5},
]


@pytest.mark.parametrize("keys", SCRIPTS, ids=str)
def test_a_script_builds_the_trainer_that_the_file_names(keys: dict[str, Any], write: Any) -> None:
    """Its calls bind to the signatures of TRL and PEFT, and it does not name hf_zero."""
    import datasets
    import peft
    import transformers

    training = read_training_file(write(**keys))
    tree = ast.parse(training_script(training))
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {*imported} <= {"datasets", "peft", "transformers", "trl"}
    calls = {ast.unparse(n.func): n for n in ast.walk(tree) if isinstance(n, ast.Call)}
    for name, call in calls.items():
        for library in (datasets, peft, transformers, trl):
            if hasattr(library, name):
                given = {each.arg: each.value for each in call.keywords}
                inspect.signature(getattr(library, name)).bind_partial(*call.args, **given)  # type: ignore[arg-type]
    trainer = "DPO" if training.task == "dpo" else "SFT"
    given = {each.arg: ast.unparse(each.value) for each in calls[f"{trainer}Config"].keywords}
    for name in {item.name for item in fields(TrainerArguments)} & keys.keys():
        assert ast.literal_eval(given[name]) == keys[name], name
    assert (given["bf16"], given["fp16"]) == (
        str(training.precision == "bf16"),
        str(training.precision == "fp16"),
    )
    assert ("eval_strategy" in given) == bool({"eval_split", "eval_fraction"} & keys.keys())
    parts = {each.arg: ast.unparse(each.value) for each in calls[f"{trainer}Trainer"].keywords}
    assert ("peft_config" in parts) == (training.adapters != "none")
    assert ("ref_model" in parts) == (training.task == "dpo" and training.adapters == "none")
    assert ("BitsAndBytesConfig" in calls) == (training.adapters == "qlora")
    assert ("packing_strategy" in given) == (training.task == "pretrain")
    described = {each.arg: ast.literal_eval(each.value) for each in calls[CARD].keywords}
    assert described == {
        "model_name": Path(training.output_dir).name, "dataset_name": training.dataset
    }  # fmt: skip
    # the command in its docstring is one that hf-zero launch takes
    assert launch_command(training) in (ast.get_docstring(tree) or "")


def test_the_command_carries_the_preset_and_the_configuration(write: Any) -> None:
    text = {"kernels": ["loss"], "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    file = write(preset="zero1", precision="fp32", ranks=3, config=text, output_dir="out")
    shown = json.loads(invoke(f"train {file} --json"))
    assert shown["script"] == invoke(f"train {file} --script")
    assert not Path("out").exists()
    for word in (
        "--preset zero1", "--precision fp32", "--ranks 3", "metrics.path=out",
        "--set zero_optimization.offload_optimizer.device=cpu", "--set 'kernels=[loss]'",
    ):  # fmt: skip
        assert word in shown["command"], word
    for own, words in (
        ({"enabled": False}, ["metrics.enabled=false"]),
        ({"peak_tflops": 900}, ["metrics.enabled=true", "metrics.path=o", "metrics.peak_tflops=9"]),
        ({"path": "elsewhere"}, ["metrics.enabled=true", "metrics.path=elsewhere"]),
    ):
        file = write(config={"metrics": own}, output_dir="out")
        command = json.loads(invoke(f"train {file} --json"))["command"]
        resumed = json.loads(invoke(f"train {file} --json --resume"))["command"]
        assert resumed == f"{command} --resume"
        assert command.count("--set metrics.") == len(words)
        assert all(f"--set {word}" in command for word in words), command


def test_the_schema_takes_what_the_reader_takes(write: Any) -> None:
    schema = json.loads(invoke("schema --train"))
    assert json.loads(json_schema()) == schema and {*schema["properties"]} == {*KEYS}
    for keys in SCRIPTS:
        jsonschema.validate(LEAST | keys, schema)
    for wrong in ({"task": "lora"}, {"lora_rank": 4}, {"ranks": 0}, {"columns": "text"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(LEAST | wrong, schema)
    assert "leave --train out" in refusal("schema --table --train")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"learning_rte": 1e-4}, "unknown key 'learning_rte'; did you mean 'learning_rate'?"),
    ({"epochs": 1}, "unknown key 'epochs'; did you mean 'num_train_epochs'?"),
    ({"task": None}, "task is missing; write task: one of 'sft', 'dpo', 'pretrain'"),
    ({"model": None}, "model is missing; write model: a model on the Hub, or its folder"),
    ({"task": "dpoo"}, 'task = "dpoo" is not one of '),
    ({"max_steps": "10"}, 'max_steps = "10" is not an integer of at least 1; write 10 without'),
    ({"save_steps": 1.5}, "save_steps = 1.5 is not a number of steps, or a share of"),
    ({"lora_target_modules": []}, "lora_target_modules = [] is not a name or a list of names"),
    ({"seed": "auto"}, 'seed = "auto" is not an integer of at least 0; remove it'),
    ({"eval_split": "a", "eval_fraction": 0.1}, "eval_split and eval_fraction exclude each other"),
    ({"max_steps": 1, "num_train_epochs": 1}, "max_steps and num_train_epochs exclude each other"),
    ({"eval_steps": 5}, "eval_steps has no data to evaluate on; write eval_fraction: 0.01"),
    ({"beta": 0.1}, "beta has no effect with task: sft; remove it"),
    ({"task": "dpo", "packing": True}, "packing has no effect with task: dpo; remove it"),
    ({"lora_r": 4}, "lora_r has no effect without adapters; write adapters: lora, or remove it"),
    ({"weights": "random"}, "weights: random needs task: pretrain without adapters"),
    ({"columns": {"promt": "a"}}, "columns: the trainer reads no 'promt'; did you mean 'prompt'?"),
    ({"columns": {"text": 3}}, "columns: text = 3 is not the name of a column; write a text"),
    ({"dataset": "rows.jsonl"}, "there is no file rows.jsonl; write the path of one, or a name"),
    ({"model": "./here"}, "there is no folder ./here; write that of a model, or a name of the Hub"),
    ({"model": "train.yaml"}, "model: train.yaml is a file; write a model's folder, or a"),
    ({"model": "~/no folder"}, "no folder; write that of a model, or a name of the Hub"),
    ({"dataset": "train.yaml"}, "has none of the suffixes .json, .jsonl, .csv, .parquet, .txt;"),
    ({"columns": {"prompt": "q", "completion": "q"}}, "columns: q is named twice; name another"),
    ({"eval_fraction": 1}, "eval_fraction = 1 is not a number above 0 and below 1; fix it, or"),
    ({"warmup_steps": 1.5}, "warmup_steps = 1.5 is not 0, a number of steps, or a share of the"),
    ({"config": {"bf16": {"enabled": True}}}, "config.bf16: write precision: bf16 in place of it"),
    ({"config": {"zero_optimization": {"stage": 1}}}, "preset names it; remove this"),
    ({"config": {"metrcs": {}}}, "config: unknown key 'metrcs'; did you mean 'metrics'?"),
    ({"zero_optimization": {"stage": 1}}, "configures ZeRO, not a training: `hf-zero launch"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "said"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_file_that_cannot_train_is_refused(keys: dict[str, Any], said: str, write: Any) -> None:
    assert said in refusal(f"train {write(**keys)}")


NAMES: list[tuple[dict[str, Any], str]] = [
    ({"lr_scheduler_type": "cosin"}, "lr_scheduler_type: there is no 'cosin'; did you mean 'cosi"),
    ({"lr_scheduler_type": "cosine_with_min_lr"}, "needs arguments that a training file does not"),
    ({"lr_scheduler_type": "warmup_stable_decay"}, "write lr_scheduler_type: cosine, or add lr_s"),
    ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "follows the loss of evaluations, and there"),
    ({"report_to": "wndb"}, "report_to: there is no tracker 'wndb'; did you mean 'wandb'?"),
    (
        {"report_to": ["none", "absent"]},
        "report_to: absent is not installed (pip install absent); ",
    ),
]


@pytest.mark.parametrize(("keys", "said"), NAMES, ids=lambda value: str(value)[:60])
def test_a_name_that_transformers_lacks_is_refused(
    keys: dict[str, Any],
    said: str,
    write: Any,
    launched: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the ranks start, which would end in a traceback of Transformers."""
    from transformers.integrations import INTEGRATION_TO_CALLBACK

    def absent() -> None:
        raise RuntimeError("pip install absent.")

    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "absent", absent)
    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "present", object)
    assert said in refusal(f"train {write(**keys)}")
    assert not launched and not Path("runs").exists()
    fitting = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_fraction": 0.1}
    invoke(f"train {write(report_to=['all', 'present'], **fitting)}")
    assert len(launched) == 1


def test_all_mistakes_are_one_message(write: Any) -> None:
    assert "is a folder; pass the YAML file of a training" in refusal("train .")
    said = refusal(f"train {write(lerning_rate=1, task='x')}")
    assert said.startswith("2 mistakes in the configuration:\n- config file train.yaml: ")
    assert "is no file; `hf-zero train --init nothing.yaml` writes" in refusal("train nothing.yaml")
    for empty in ("empty.yaml", "empty.json"):
        Path(empty).touch()
        assert refusal(f"train {empty}").endswith(
            f"config file {empty} is empty, not keys and values; write a mapping such as task: "
            "sft, or let `hf-zero train --init` write a file"
        )


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr("hf_zero.cli.launch.start_ranks", calls.append)
    return calls


def option(request: Any, name: str) -> str:
    """The value of an option of accelerate launch."""
    return request.accelerate[request.accelerate.index(name) + 1]


def test_the_script_is_written_and_launched(write: Any, launched: list[Any]) -> None:
    file = write(output_dir="out", precision="fp32")
    assert "`hf-zero top out` shows the run" in invoke(f"train {file}")
    request, text = launched.pop(), Path("out/train.py").read_text()
    assert request.script == "out/train.py" and text == invoke(f"train {file} --script")
    assert option(request, "--zero_stage") == "2" and request.num_procs is None
    assert "out has no checkpoint; leave --resume out" in refusal(f"train {file} --resume")
    (Path("out") / "checkpoint-4").mkdir()
    assert "out has checkpoints of an earlier run (checkpoint-4)" in refusal(f"train {file}")
    invoke(f"train {file} --resume")
    request = launched.pop()
    assert (request.script, request.arguments) == ("out/train.py", ("--resume",))
    Path("file").touch()
    said = refusal(f"train {write(output_dir='file/out')}")
    assert "file/out/train.py cannot be written (Not a directory); name another" in said


def test_a_training_begins_after_an_equal_comparison(
    write: Any, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[Any] = []
    answers = iter((True, False))

    def compare(request: Any, options: Any) -> bool:
        compared.append((request, options.steps))
        return next(answers)

    monkeypatch.setattr("hf_zero.cli.parity.compare", compare)
    file = write(output_dir="out", precision="fp32", ranks=3, parity=4, preset="zero3")
    invoke(f"train {file}")
    request = launched.pop()
    assert (request.script, request.arguments) == ("out/train.py", ())
    invoke(f"train {file}", ends_with=1)
    assert not launched
    ((request, steps), _) = compared
    assert (request.script, request.num_procs, steps) == ("out/train.py", 3, 4)
    assert option(request, "--zero_stage") == "3"
    said = refusal(f"parity --precision bf16 -- {file} --lr 1")
    assert "train.yaml is a file of hf-zero train, which has its own keys: write what" in said
    assert "--precision --lr 1 says there" in said


def test_a_precision_that_the_machine_decides(
    write: Any, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file written without a GPU trains in bf16 where there is one."""
    invoke("train --init mine.yaml --yes")
    assert read_training_file("mine.yaml").precision == "auto"
    for devices, precision in ((0, "fp32"), (2, "bf16")):
        monkeypatch.setattr("hf_zero.device.kinds.device_count", lambda count=devices: count)
        invoke(f"train {write(precision='auto', output_dir='out')}")
        named = {"fp32": "no"}.get(precision, precision)
        assert option(launched.pop(), "--mixed_precision") == named
        assert f"bf16={precision == 'bf16'}," in Path("out/train.py").read_text()


DATA: list[tuple[str, dict[str, Any], str]] = [
    ("", {}, "rows.jsonl cannot be loaded with split: train ("),
    ('{"text": "a"', {}, "mend the file, or name another"),
    ('{"text": "a"}', {"split": "test"}, "cannot be loaded with split: test (Unknown split"),
    ("text", {"dataset": "rows.csv"}, "rows.csv cannot be loaded with split: train (Inst"),
    ('{"q": "a", "a": "b"}', {}, "or text or input_ids, and rows.jsonl has a, q; map them, as in"),
    ('{"q": "a"}', {"task": "dpo"}, "task dpo reads the columns chosen and rejected, and"),
    ('{"q": "a"}', {"columns": {"text": "p"}}, "columns: text: rows.jsonl has no column 'p'; name"),
]


@pytest.mark.parametrize(("rows", "keys", "said"), DATA, ids=lambda value: str(value)[:40])
def test_a_file_that_the_task_cannot_read_is_refused(
    rows: str,
    keys: dict[str, Any],
    said: str,
    write: Any,
    launched: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    keys = {"dataset": "rows.jsonl", **keys}
    Path(keys["dataset"]).write_text(rows and rows + "\n")
    assert said in refusal(f"train {write(**keys)}")
    assert not launched and not Path("runs").exists()
    Path("rows.jsonl").write_text('{"q": "a", "text": "b"}\n')
    invoke(f"train {write(dataset='rows.jsonl', columns={'text': 'q'})}")
    assert len(launched) == 1


def test_what_is_missing_is_named_before_the_ranks_start(
    write: Any, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = {"trl", "peft", "bitsandbytes"}
    monkeypatch.setattr(command, "find_spec", lambda name: None if name in missing else name)
    said = refusal(f"train {write(adapters='qlora')}")
    assert "needs pip install 'hf-zero[trl]' 'hf-zero[peft]' bitsandbytes" in said
    assert refusal(f"train {write()}").endswith("needs pip install 'hf-zero[trl]'")
    missing.clear()
    monkeypatch.setattr("hf_zero.device.kinds.device_count", lambda: 0)
    assert "qlora needs a GPU, for the 4-bit" in refusal(f"train {write(adapters='qlora')}")
    monkeypatch.setattr("hf_zero.device.kinds.device_count", lambda: 1)
    invoke(f"train {write(adapters='qlora')}")
    assert len(launched) == 1


@pytest.mark.parametrize("task", ["sft", "dpo", "pretrain"])
def test_init_asks_five_questions(task: str, write: Any) -> None:
    answers = f"{task}\n\n\nlorra\n\nzero9\nzero1\n"
    shown = CliRunner().invoke(app, ["train", "mine.yaml", "--init"], input=answers)
    assert shown.exit_code == 0, shown.output
    asked = [name for name in KEYS if re.search(rf"^(.*: )?{name} \[", shown.output, re.M)]
    assert sorted(asked) == sorted(["task", "model", "dataset", "adapters", "preset"])
    assert "'lorra' is not one of 'none', 'lora', 'qlora'" in shown.output
    training = read_training_file("mine.yaml")
    assert (training.task, training.preset) == (task, "zero1")
    assert training.adapters == ("none" if task == "pretrain" else "lora")
    lines = Path("mine.yaml").read_text().splitlines()
    assert len(lines) < 60 and all(line.startswith("#") or "  # " in line for line in lines)


def test_init_quotes_answers_and_names_that_yaml_or_a_shell_would_read_otherwise(
    write: Any,
) -> None:
    for model in ("runs/a #2", "runs: a", "no", "1e5", "'a", "plain/name"):
        Path("my file.yaml").unlink(missing_ok=True)
        given = f"sft\n{model}\n\n\n\n"
        shown = CliRunner().invoke(app, ["train", "my file.yaml", "--init"], input=given)
        assert "`hf-zero train 'my file.yaml'` trains" in shown.output
        training = read_training_file("my file.yaml")
        assert training.model == model and training.learning_rate == 2e-4
        assert training.output_dir == "runs/my file"
    assert "\nmodel: plain/name  #" in Path("my file.yaml").read_text()


def test_init_takes_the_defaults_and_overwrites_nothing(
    write: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(invoke("train --init mine.yaml --yes --json"))
    assert found["answers"]["task"] == read_training_file("mine.yaml").task == "sft"
    assert "mine.yaml exists; remove it, or pass another path to --init" in refusal(
        "train --init mine.yaml --yes"
    )
    assert "--yes answers the questions of --init" in refusal("train mine.yaml --yes")
    for option in ("--script", "--resume"):
        said = refusal(f"train new.yaml --init --yes {option}")
        assert f"--init only writes the file; leave {option} out" in said
        assert not Path("new.yaml").exists()
    monkeypatch.setattr(sys, "argv", ["hf-zero", "train", "other.yaml", "--init"])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "a question has no answer; pass --yes for the defaults" in capsys.readouterr().err
    assert {*PRESETS} <= {*str(KEYS["preset"].note).replace(",", "").split()}
