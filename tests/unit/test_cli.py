"""The commands: what they print for people and as JSON, and that bad input ends with code 2, one line and no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig
from typer.testing import CliRunner

import hf_zero
from hf_zero.cli import doctor, launch, main
from hf_zero.cli.app import BAD_INPUT, app
from hf_zero.cli.printing import in_units
from hf_zero.config import PRESETS

ROOT = Path(__file__).resolve().parents[2]
ZERO3 = str(ROOT / "recipes" / "bert-mlm" / "zero3.yaml")
COMMANDS = ["doctor", "estimate", "explain", "convert-checkpoint", "launch"]


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def model(tmp_path: Path) -> str:
    config = BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    config.architectures = ["BertForMaskedLM"]
    config.save_pretrained(tmp_path)
    return str(tmp_path)


def test_the_installed_command_is_this_app() -> None:
    command = Path(sys.executable).with_name("hf-zero")
    result = subprocess.run([command, "--help"], capture_output=True, text=True, timeout=120, check=True)
    assert all(name in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    said = " ".join(invoke(command, "--help").split())
    assert f"Example: hf-zero {command}" in said
    assert "--json" in said


def test_estimate_prints_the_library_s_figures(model: str) -> None:
    expected = hf_zero.estimate(model, ranks=4, precision="bf16", optimizer="SGD")
    assert json.loads(invoke("estimate", model, "--ranks", "4", "--optimizer", "SGD", "--json")) == json.loads(
        json.dumps(expected.to_dict())
    )
    table = invoke("estimate", model, "--ranks", "4", "--optimizer", "SGD")
    assert f"{expected.total_parameters:,} parameters" in table
    assert all(in_units(row.state) in table for row in expected.stages)


def test_estimate_takes_precision_from_a_config(model: str) -> None:
    assert json.loads(invoke("estimate", model, "--ranks", "2", "--config", ZERO3, "--stage", "3", "--json"))["precision"] == "fp32"


def test_explain_shows_every_value_with_its_source() -> None:
    rows = {row["key"]: row for row in json.loads(invoke("explain", ZERO3, "--ranks", "2", "--json"))}
    assert rows["zero_optimization.stage"]["value"] == 3
    assert "zero3.yaml" in rows["zero_optimization.stage"]["source"]
    assert rows["train_batch_size"]["value"] == 2
    assert "zero_optimization.stage" in invoke("explain", "zero1")


def test_convert_checkpoint_hands_its_options_over(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_zero.checkpoint.export import Conversion

    asked: list[Any] = []

    def convert(*arguments: Any, **options: Any) -> Conversion:
        asked.append((arguments, options))
        return Conversion(Path("to"), ("model.safetensors",), ("config.json",), 3, 1000, 4000)

    monkeypatch.setattr(hf_zero, "convert_checkpoint", convert, raising=False)
    table = invoke("convert-checkpoint", "from", "to", "--dtype", "bfloat16", "--max-shard-size", "1GB", "--tag", "t", "--verify")
    assert asked[0] == ((Path("from"), Path("to"), "bfloat16", "1GB", "t", None), {"verify": True})
    assert "1,000 parameters, 4.00 kB: model.safetensors" in table and "config.json" in table
    assert json.loads(invoke("convert-checkpoint", "from", "to", "--json"))["files"] == ["model.safetensors"]


@pytest.mark.parametrize("preset", PRESETS)
def test_launch_presets_are_read_back_as_their_stage(preset: str) -> None:
    command = json.loads(
        invoke("launch", "--preset", preset, "--ranks", "3", "--precision", "bf16", "--json", "--", "train.py", "--lr", "1")
    )["command"]
    assert command[:3] == [sys.executable, "-m", "accelerate.commands.launch"]
    assert command[-3:] == ["train.py", "--lr", "1"]

    from accelerate.commands.launch import launch_command_parser

    args = launch_command_parser().parse_args(command[3:])
    assert (args.use_deepspeed, int(args.zero_stage), args.num_processes, args.mixed_precision) == (True, PRESETS[preset], 3, "bf16")
    assert (args.training_script, args.training_script_args) == ("train.py", ["--lr", "1"])


def test_launch_takes_a_file_and_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: started.append((program, arguments)))
    invoke("launch", "--config", ZERO3, "--", "train.py")
    ((program, arguments),) = started
    assert program == sys.executable
    assert arguments[3:] == ["--config_file", ZERO3, "train.py"]


def test_launch_without_preset_or_file_is_torchrun_and_the_script_s_options_are_its_own() -> None:
    plain = ["launch", "--num-procs", "3", "--json"]
    for arguments in (["train.py", "--json", "--ranks", "9"], ["--", "train.py", "--json", "--ranks", "9"]):
        command = json.loads(invoke(*plain, *arguments))["command"]
        assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
        assert command[-4:] == ["train.py", "--json", "--ranks", "9"] and command[command.index("--nproc-per-node") + 1] == "3"


@pytest.mark.parametrize("chosen", [[], ["--preset", "zero2"]])
def test_launch_shows_what_each_host_would_run(chosen: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hush-hush")
    file = tmp_path / "hosts"
    file.write_text("10.9.9.1 slots=4\n10.9.9.2 slots=4\n")
    options = ["--hostfile", str(file), "-i", "10.9.9.1:2,3@10.9.9.2:0,1", "--master-port", "77", "--export", "A=1"]
    said = invoke("launch", *options, *chosen, "--json", "train.py")
    shown = json.loads(said)
    assert shown["meeting"] == "10.9.9.1:77" and "hush-hush" not in said
    assert [host["host"] for host in shown["hosts"]] == ["10.9.9.1", "10.9.9.2"]
    assert [host["slots"] for host in shown["hosts"]] == [[2, 3], [0, 1]]
    module = "accelerate.commands.launch" if chosen else "torch.distributed.run"
    assert all(
        host["command"][2] == module and {"A", "HF_TOKEN", "CUDA_VISIBLE_DEVICES"} <= {*host["environment"]} for host in shown["hosts"]
    )
    if chosen:
        assert all("--num_machines" in host["command"] and host["command"].count("--num_processes") == 1 for host in shown["hosts"])


def test_launch_without_gpus_takes_two_cpu_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert launch._default_ranks() == 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    assert launch._default_ranks() == 5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["estimate", "/no/such/model", "--ranks", "2"], "/no/such/model"),
        (["estimate", ZERO3, "--ranks", "0"], "ranks = 0"),
        (["explain", "/no/such.yaml"], "/no/such.yaml"),
        (["convert-checkpoint", "/no/such/run", "/tmp/never-written"], "/no/such/run"),
        (["launch", "--preset", "zero9", "--", "x.py"], "'zero9' is unknown; choose one of zero0"),
        (["launch", "--preset", "zero1", "--precision", "int4", "--", "x.py"], "'int4' is unknown"),
        (["launch", "--precision", "bf16", "x.py"], "--precision bf16 goes with --preset"),
        (["launch", "--preset", "zero1", "--config", ZERO3, "x.py"], "--preset zero1 and --config"),
        (
            ["launch", "--ranks", "2", "--num-procs", "2", "x.py"],
            "--ranks counts the ranks of this machine alone; beside it use --num-procs",
        ),
        (["launch", "--ranks", "2", "--hostfile", "/no/such/hosts", "x.py"], "with --hostfile use --num-procs"),
        (["launch", "--hostfile", "/no/such/hosts", "x.py"], "the hostfile /no/such/hosts cannot be read"),
        (["launch", "--include", "worker-1", "x.py"], "no host 'worker-1'"),
        (["launch", "--ranks", "0", "--", "x.py"], "--ranks 0"),
        (["launch", "--config", "/no/such.yaml", "--", "x.py"], "/no/such.yaml"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hf-zero", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == BAD_INPUT == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("hf-zero: ") and err.count("\n") == 1
    assert says in err


@pytest.mark.parametrize("arguments", [["estimate"], ["nonsense"], ["explain", "a", "b"], ["estimate", "m", "--ranks", "two"]])
def test_wrong_usage_is_code_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_doctor_knows_the_slot_and_the_devices() -> None:
    found = {(row["part"], row["name"]): row for row in json.loads(invoke("doctor", "--json"))}
    assert found["versions", "torch"]["detail"] == torch.__version__
    assert found["slot", "deepspeed"]["status"] == "ok"
    assert found["slot", "entry point"]["status"] == "ok"
    assert found["devices", "gloo"]["status"] == "ok"
    assert found["devices", "cuda:0" if torch.cuda.is_available() else "cuda"]["status"] == ("ok" if torch.cuda.is_available() else "off")
    assert "hf-zero doctor" in invoke("doctor")


def test_doctor_sees_what_turns_the_slot_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    monkeypatch.setenv("HF_ZERO_AUTOLOAD", "off")
    status = {finding.name: finding.status for finding in doctor.examine() if finding.part == "slot"}
    assert (status["TORCH_DEVICE_BACKEND_AUTOLOAD"], status["HF_ZERO_AUTOLOAD"]) == ("off", "off")


def test_doctor_ends_with_1_where_a_requirement_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["no-such-package>=1", "torch>=99", "peft>=99; extra == 'test'"])
    findings = {finding.name: finding for finding in doctor.examine()}
    assert findings["no-such-package"].detail == "not installed; pip install 'no-such-package>=1'"
    assert findings["torch"].status == "broken" and ">=99" in findings["torch"].detail
    assert "peft" not in findings
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 1


def test_doctor_shows_why_the_autoload_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_zero._autoload.failure", ImportError("half an installation"))
    assert [finding.detail for finding in doctor.examine() if finding.name == "autoload"] == ["ImportError: half an installation"]
