"""``hf-zero launch``: the command of accelerate or torchrun that each host would run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_zero.config.launched import LAUNCHED_BY, names_no_stage
from hf_zero.launch.plan import LAUNCHER
from tests.cli.invoked import ZERO3, invoke, refusal


@pytest.fixture(autouse=True)
def train_py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to work in, with a script of this name."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)


def command_of(line: str) -> list[str]:
    found: list[str] = json.loads(invoke(f"launch {line}"))["command"]
    return found


DEFAULTS = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
num_processes: 5
mixed_precision: bf16
main_process_port: 1
deepspeed_config:
  {zero_stage: 3, gradient_clipping: 0.5, offload_optimizer_device: cpu, metrics: {enabled: true}}
"""


def test_a_preset_takes_no_keys_from_the_default_file_of_accelerate_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.commands import launch

    default = tmp_path / "default.yaml"
    default.write_text(DEFAULTS)
    for path in ("commands.launch", "commands.config.config_args", "commands.config"):
        monkeypatch.setattr(f"accelerate.{path}.default_config_file", str(default))
    command = command_of("--preset zero1 --ranks 2 --json train.py")
    parsed = launch.launch_command_parser().parse_args(command[4:])
    args, _, _ = launch._validate_launch_command(parsed)
    assert args.gradient_clipping is None and args.offload_optimizer_device is None
    assert not hasattr(args, "metrics")
    assert (int(args.zero_stage), args.num_processes, args.mixed_precision) == (1, 2, "no")
    args.deepspeed_fields_from_accelerate_config = ""
    _, environment = launch.prepare_deepspeed_cmd_env(args)
    assert not {"HF_ZERO_LAUNCH_FILE", "HF_ZERO_WRITTEN_KEYS"} & environment.keys()


def test_a_launch_starts_with_its_file_or_the_keys_beside_its_preset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hf_zero.integrations.accelerate.plugin import written_keys

    started: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda *given: started.append(given))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    invoke("launch", "--config", ZERO3, "--", "train.py")
    ((program, arguments),) = started
    assert program == sys.executable
    assert arguments[3:] == ["accelerate.commands.launch", "--config_file", ZERO3, "train.py"]
    sets = "--set metrics.enabled=true --set metrics.path=runs/a --set csv_monitor.enabled=true"
    invoke(f"launch --preset zero2 {sets} train.py")
    assert os.environ[LAUNCHED_BY] == f"hf-zero launch --preset zero2 {sets}"
    metrics = {"enabled": True, "path": "runs/a"}
    assert written_keys() == {"metrics": metrics, "csv_monitor": {"enabled": True}}
    invoke("launch --preset zero2 --set comet.api_key=hush-hush train.py")
    assert os.environ[LAUNCHED_BY] == "hf-zero launch --preset zero2 --set comet.api_key=***"
    assert written_keys() == {"comet": {"api_key": "hush-hush"}}
    assert not names_no_stage()
    invoke("launch --ranks 2 train.py")
    assert names_no_stage()


def test_keys_and_files_that_launch_does_not_take(tmp_path: Path) -> None:
    for options, said in (
        ("--set metrics.enabled=true", "goes with --preset"),
        ("--preset zero2 --set metrics.enabld=true", "did you mean 'metrics.enabled'"),
        ("--preset zero2 --set metrics.enabled=maybe", "is not true or false"),
        ("--preset zero2 --set metrics", "--set metrics is not KEY=VALUE"),
        ("--preset zero2 --set metrics.=1", "is not KEY=VALUE"),
        ("--preset zero2 --set metrics=1 --set metrics.enabled=true", "contradict; keep one"),
        ("--preset zero2 --set metrics.enabled=true --set metrics=1", "contradict; keep one"),
        ("--preset zero2 --set compile.backend=eager --set compile=blocks", "contradict; keep one"),
        (
            "--preset zero2 --set zero_optimization.aio=1 --set zero_optimization.aio.block_size=2",
            "block_size=2 and --set zero_optimization.aio=1 contradict; keep one",
        ),
        ("--preset zero2 --set metrics.enabled=[", "not valid YAML"),
        ("--preset zero2 --set metrics.enabled=", "write --set metrics.enabled=VALUE"),
        ("--preset zero2 --set zero_optimization.stage=3", "--preset names the stage"),
        ("--preset zero2 --set zero_optimization=1", "--set zero_optimization=1 is not a key"),
        ("--preset zero2 --set zero_optimization=", "write --set zero_optimization.KEY=VALUE"),
        ("--preset zero2 --set bf16.enabled=true", "write --precision bf16 in place of it"),
        ("--preset zero3 --set zero_optimization.prefetch=x", "zero_optimization.prefetch"),
    ):
        assert said in refusal(f"launch {options} train.py"), options
    file = tmp_path / "zero3.json"
    file.write_text('{"zero_optimization": {"stage": 3}}')
    said = refusal(f"launch --config {file} -- train.py")
    assert f"deepspeed_config: {{deepspeed_config_file: {file}}}" in said


def test_without_preset_or_file_it_is_torchrun_and_the_script_s_options_are_its_own() -> None:
    for separator in ("", "-- "):
        command = command_of(f"--num-procs 3 --json {separator}train.py --json --ranks 9")
        assert command[:4] == [sys.executable, "-m", LAUNCHER, "torch.distributed.run"]
        assert command[-4:] == ["train.py", "--json", "--ranks", "9"]
        assert command[command.index("--nproc-per-node") + 1] == "3"
    said = invoke("launch --ranks 2 --json no-such.py", ends_with=2)
    assert "the script no-such.py is not in" in said


def test_what_each_host_would_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hush-hush")
    file = tmp_path / "hosts"
    file.write_text("10.9.9.1 slots=4\n10.9.9.2 slots=4\n")
    slots = "10.9.9.1:2,3@10.9.9.2:0,1"
    options = f"--hostfile {file} -i {slots} --master-port 77 --export A=1"
    for chosen in ([], ["--preset", "zero2"]):
        said = invoke("launch", options, *chosen, "--json", "train.py")
        shown = json.loads(said)
        assert shown["meeting"] == "10.9.9.1:77" and "hush-hush" not in said
        assert [host["host"] for host in shown["hosts"]] == ["10.9.9.1", "10.9.9.2"]
        assert [host["slots"] for host in shown["hosts"]] == [[2, 3], [0, 1]]
        module = "accelerate.commands.launch" if chosen else "torch.distributed.run"
        for host in shown["hosts"]:
            command = host["command"]
            assert command[3] == module
            assert {"A", "HF_TOKEN", "CUDA_VISIBLE_DEVICES"} <= {*host["environment"]}
            counts = ("--num_machines", "--num_processes")
            assert not chosen or [command.count(name) for name in counts] == [1, 1]


def test_options_that_count_ranks_beside_a_file(tmp_path: Path) -> None:
    file = tmp_path / "zero.yaml"
    content = "{distributed_type: DEEPSPEED, num_machines: 2, deepspeed_config: {zero_stage: 2}}"
    file.write_text(content)
    assert "--num_processes" not in command_of(f"--config {file} --json train.py")
    assert "num_machines = 2" in refusal(f"launch --config {file} --ranks 3 train.py")
    file.write_text(content.replace("num_machines: 2, ", ""))
    command = command_of(f"--config {file} --ranks 3 --json train.py")
    assert command[command.index("--num_processes") + 1] == "3"
