"""``accelerate launch`` with a ZeRO configuration, up to the moment before it would start the
ranks.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from hf_zero.errors import ConfigError
from hf_zero.integrations import finder
from hf_zero.integrations.accelerate import launch as ranks_of

launch = pytest.importorskip("accelerate.commands.launch")

ZERO3 = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "DEEPSPEED",
    "deepspeed_config": {"zero_stage": 3},
    "num_machines": 1,
    "num_processes": 2,
    "main_process_port": 0,
    "use_cpu": True,
}


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., str]:
    def write(**changes: Any) -> str:
        path = tmp_path / "zero.yaml"
        path.write_text(
            yaml.safe_dump(
                {key: value for key, value in {**ZERO3, **changes}.items() if value is not None}
            )
        )
        return str(path)

    return write


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "ACCELERATE_USE_CPU",
        "ACCELERATE_USE_DEEPSPEED",
        "CUDA_VISIBLE_DEVICES",
        "HF_ZERO_BACKEND",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Namespace, dict[str, str]]]:
    """Launchers that only note what they would have started, with the environment of the ranks."""
    seen: list[tuple[str, Namespace, dict[str, str]]] = []

    def note(
        kind: str, prepare: Callable[[Namespace], tuple[Any, dict[str, str]]]
    ) -> Callable[[Namespace], None]:
        return lambda args: seen.append((kind, args, prepare(args)[1]))

    monkeypatch.setattr(
        launch, "deepspeed_launcher", note("zero", launch.prepare_deepspeed_cmd_env)
    )
    monkeypatch.setattr(
        launch, "simple_launcher", note("simple", launch.prepare_simple_launcher_cmd_env)
    )
    return seen


def parse(*arguments: str) -> Namespace:
    return launch.launch_command_parser().parse_args(
        [*arguments, "train.py", "--config", "the script's own"]
    )


@pytest.mark.parametrize("flag", ["--config", "--config_file", "--config-file"])
def test_config_means_config_file(flag: str, file: Callable[..., str]) -> None:
    args = parse(flag, file())
    assert args.config_file == file()
    assert args.training_script == "train.py"
    assert args.training_script_args == ["--config", "the script's own"]


def test_config_is_known_to_the_accelerate_command_too() -> None:
    from accelerate.commands.utils import CustomArgumentParser

    parser = CustomArgumentParser("Accelerate CLI tool", allow_abbrev=False)
    launch.launch_command_parser(parser.add_subparsers())
    assert (
        parser.parse_args(["launch", "--config", "zero3.yaml", "train.py"]).config_file
        == "zero3.yaml"
    )


def test_other_parsers_are_left_alone() -> None:
    from accelerate.commands.utils import CustomArgumentParser

    parser = CustomArgumentParser(allow_abbrev=False)
    parser.add_argument("--config_path")
    with pytest.raises(SystemExit):
        parser.parse_args(["--config", "x"])
    assert isinstance(parser, ArgumentParser)


def test_cpu_ranks_see_no_gpu_and_keep_zero(file: Callable[..., str], started: list[Any]) -> None:
    launch.launch_command(parse("--config", file()))
    ((kind, args, environment),) = started
    assert kind == "zero"
    assert (args.nproc_per_node, args.deepspeed_multinode_launcher) == ("2", "standard")
    assert environment["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert "ACCELERATE_USE_CPU" not in environment


def test_gpu_ranks_see_their_gpus(
    file: Callable[..., str], started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    launch.launch_command(parse("--config", file(use_cpu=False)))
    ((kind, _, environment),) = started
    assert kind == "zero"
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_the_cpu_flag_shards_on_cpu_ranks(file: Callable[..., str], started: list[Any]) -> None:
    launch.launch_command(parse("--cpu", "--config", file(use_cpu=False)))
    ((kind, _, environment),) = started
    assert kind == "zero"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""


def test_a_variable_that_forces_the_cpu_shards_on_cpu_ranks(
    file: Callable[..., str], started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    launch.launch_command(parse("--config", file(use_cpu=False)))
    ((kind, _, environment),) = started
    assert kind == "zero"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert "ACCELERATE_USE_CPU" not in environment


def test_no_plain_process_is_started_for_zero() -> None:
    with pytest.raises(ConfigError, match=r"--cpu beside a DEEPSPEED configuration.*use_cpu: true"):
        launch.prepare_simple_launcher_cmd_env(Namespace(use_deepspeed=True, cpu=True))


def test_a_plain_launch_stays_plain(file: Callable[..., str], started: list[Any]) -> None:
    launch.launch_command(
        parse("--config", file(distributed_type="NO", deepspeed_config=None, num_processes=1))
    )
    ((kind, _, environment),) = started
    assert kind == "simple"
    assert environment["ACCELERATE_USE_CPU"] == "True"


def test_several_machines_default_to_the_standard_launcher(
    file: Callable[..., str], started: list[Any]
) -> None:
    path = file(
        num_machines=2,
        num_processes=4,
        machine_rank=1,
        main_process_ip="127.0.0.1",
        main_process_port=29512,
    )
    launch.launch_command(parse("--config", path))
    ((_, args, _),) = started
    assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("2", "2", 1)


def test_several_machines_refuse_a_launcher_that_runs_a_program_called_deepspeed(
    file: Callable[..., str], started: list[Any]
) -> None:
    section = {"zero_stage": 3, "deepspeed_multinode_launcher": "pdsh"}
    path = file(
        num_machines=2, num_processes=4, main_process_ip="127.0.0.1", deepspeed_config=section
    )
    with pytest.raises(ConfigError, match=r"deepspeed_multinode_launcher: pdsh .*machine_rank"):
        launch.launch_command(parse("--config", path))


def test_a_key_that_accelerate_would_drop_is_an_error(
    file: Callable[..., str], started: list[Any]
) -> None:
    with pytest.raises(
        ConfigError, match=r"unknown key 'deepspeed_config\.zero_stag'; did you mean 'zero_stage'"
    ):
        launch.launch_command(parse("--config", file(deepspeed_config={"zero_stag": 3})))
    assert not started


KEYS = {
    "kernels": ["loss"],
    "compile": "blocks",
    "activation_checkpointing": {"blocks": True},
    "attention_backend": "auto",
}


def test_keys_that_accelerate_does_not_know_reach_the_plugin(
    file: Callable[..., str], started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.utils import DeepSpeedPlugin

    launch.launch_command(parse("--config", file(deepspeed_config={"zero_stage": 3, **KEYS})))
    for name, value in started[0][2].items():
        if name.startswith(("ACCELERATE_DEEPSPEED", "HF_ZERO_")):
            monkeypatch.setenv(name, value)
    made = DeepSpeedPlugin().deepspeed_config
    assert {name: made[name] for name in KEYS} == KEYS and made["zero_optimization"]["stage"] == 3
    assert (
        not KEYS.keys()
        & DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}}).deepspeed_config.keys()
    )
    monkeypatch.setattr(finder, "chosen", lambda: False)
    assert not KEYS.keys() & DeepSpeedPlugin().deepspeed_config.keys()


def test_keys_beside_a_file_by_flag_are_refused(
    file: Callable[..., str], started: list[Any]
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"deepspeed_config\.activation_checkpointing is given besides "
        r"--deepspeed_config_file ds\.json.*move it into ds\.json",
    ):
        launch.launch_command(
            parse(
                "--deepspeed_config_file",
                "ds.json",
                "--config",
                file(deepspeed_config={"zero_stage": 3, **KEYS}),
            )
        )
    assert not started


def test_another_deepspeed_is_left_alone(
    file: Callable[..., str], started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finder, "chosen", lambda: False)
    launch.launch_command(
        parse("--config", file(deepspeed_config={"zero_stage": 3, "its_own_key": 1}))
    )
    launch.launch_command(parse("--cpu", "--config", file()))
    assert [kind for kind, _, _ in started] == ["zero", "simple"]
    assert started[0][1].deepspeed_multinode_launcher == "pdsh"


def test_the_ranks_hear_of_the_folders_for_files(
    file: Callable[..., str], started: list[Any]
) -> None:
    """Accelerate passes on the devices alone, by the file and by the flags."""
    named = {
        "offload_optimizer_device": "nvme",
        "offload_optimizer_nvme_path": "/one",
        "offload_param_device": "nvme",
    }
    launch.launch_command(
        parse(
            "--config",
            file(deepspeed_config={"zero_stage": 3, **named, "offload_param_nvme_path": "/two"}),
        )
    )
    launch.launch_command(parse("--offload_param_nvme_path", "/three", "--config", file()))
    launch.launch_command(parse("--config", file()))
    told = [
        [
            found.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{what}_NVME_PATH")
            for what in ("OPTIMIZER", "PARAM")
        ]
        for _, _, found in started
    ]
    assert told == [["/one", "/two"], [None, "/three"], [None, None]]


def test_cpu_ranks_of_training_arguments_join_before_accelerate_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Accelerate's group would be on a store that torchrun keeps from earlier attempts."""
    joined: list[Any] = []
    monkeypatch.setattr(ranks_of, "launched", lambda: True)
    monkeypatch.setattr(ranks_of.finder, "chosen", lambda: True)
    monkeypatch.setattr(
        ranks_of, "init_distributed", lambda backend, timeout: joined.append((backend, timeout))
    )
    begin = ranks_of.see_ranks(lambda arguments: joined.append("original"))
    for cpu in (True, False):
        begin(SimpleNamespace(deepspeed={}, use_cpu=cpu, ddp_timeout=90))
    begin(SimpleNamespace(deepspeed={"zero_optimization": {}}, use_cpu=True, ddp_timeout=90))
    assert joined == ["original", "original", ("gloo", timedelta(seconds=90)), "original"]
