"""``accelerate launch`` with a ZeRO configuration, up to the moment before it would start the
ranks.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.commands import launch
from accelerate.commands.utils import CustomArgumentParser
from accelerate.utils import DeepSpeedPlugin, DistributedType

from hf_zero.config.launched import LAUNCHED_BY
from hf_zero.errors import ConfigError, LaunchError
from hf_zero.integrations import finder
from hf_zero.integrations.accelerate.launched_ranks import launched, prepare_without_zero

ZERO3 = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "DEEPSPEED",
    "deepspeed_config": {"zero_stage": 3},
    "num_machines": 1,
    "num_processes": 2,
    "main_process_port": 0,
    "use_cpu": True,
}
MACHINES = {"num_machines": 2, "num_processes": 4, "main_process_ip": "127.0.0.1"}
Started = list[tuple[str, Namespace, dict[str, str]]]


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., str]:
    def write(section: dict[str, Any] | None = None, **changes: Any) -> str:
        content = {**ZERO3, **({"deepspeed_config": section} if section else {}), **changes}
        path = tmp_path / "zero.yaml"
        path.write_text(yaml.safe_dump({k: v for k, v in content.items() if v is not None}))
        return str(path)

    return write


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    zero = ("ACCELERATE_USE_CPU", "ACCELERATE_USE_DEEPSPEED", "HF_ZERO_BACKEND")
    for name in (*zero, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Launchers that only note what they would have started, with the environment of the ranks."""
    seen: Started = []
    kinds = {
        "zero": ("deepspeed_launcher", launch.prepare_deepspeed_cmd_env),
        "simple": ("simple_launcher", launch.prepare_simple_launcher_cmd_env),
    }
    for kind, (name, prepare) in kinds.items():

        def note(args: Namespace, kind: str = kind, prepare: Any = prepare) -> None:
            seen.append((kind, args, prepare(args)[1]))

        monkeypatch.setattr(launch, name, note)
    return seen


def parse(*arguments: str) -> Namespace:
    script = ("train.py", "--config", "the script's own")
    return launch.launch_command_parser().parse_args([*arguments, *script])


def start(*arguments: str) -> None:
    launch.launch_command(parse(*arguments))


def test_config_means_config_file(file: Callable[..., str]) -> None:
    """Of accelerate launch alone; other parsers are left alone."""
    for flag in ("--config", "--config_file", "--config-file"):
        args = parse(flag, file())
        assert args.config_file == file()
        assert args.training_script == "train.py"
        assert args.training_script_args == ["--config", "the script's own"]
    parser = CustomArgumentParser("Accelerate CLI tool", allow_abbrev=False)
    launch.launch_command_parser(parser.add_subparsers())
    found = parser.parse_args(["launch", "--config", "zero3.yaml", "train.py"])
    assert found.config_file == "zero3.yaml"
    other = CustomArgumentParser(allow_abbrev=False)
    other.add_argument("--config_path")
    with pytest.raises(SystemExit):
        other.parse_args(["--config", "x"])


def test_cpu_ranks_see_no_gpu_and_keep_zero(
    file: Callable[..., str], started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the file, by the flag and by a variable."""
    start("--config", file())
    start("--cpu", "--config", file(use_cpu=False))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    start("--config", file(use_cpu=False))
    assert len(started) == 3
    for kind, args, environment in started:
        assert kind == "zero"
        assert (args.nproc_per_node, args.deepspeed_multinode_launcher) == ("2", "standard")
        assert environment["ACCELERATE_USE_DEEPSPEED"] == "true"
        assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
        assert environment["CUDA_VISIBLE_DEVICES"] == ""
        assert "ACCELERATE_USE_CPU" not in environment


def test_only_a_local_rank_with_a_number_tells_of_a_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for text, told in (("", False), ("0", True)):
        monkeypatch.setenv("LOCAL_RANK", text)
        assert launched() is told, text


def test_other_launches(
    file: Callable[..., str], started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("--config", file(**MACHINES, machine_rank=1, main_process_port=29512))
    args = started[-1][1]
    assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("2", "2", 1)
    start("--config", file(distributed_type="NO", deepspeed_config=None, num_processes=1))
    kind, _, environment = started[-1]
    assert (kind, environment["ACCELERATE_USE_CPU"]) == ("simple", "True")
    with pytest.raises(ConfigError, match=r"--cpu beside a DEEPSPEED configuration"):
        launch.prepare_simple_launcher_cmd_env(Namespace(use_deepspeed=True, cpu=True))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    start("--config", file(use_cpu=False))
    kind, _, environment = started[-1]
    assert (kind, environment["CUDA_VISIBLE_DEVICES"]) == ("zero", "2,3")
    monkeypatch.setattr(finder, "chosen", lambda: False)
    start("--config", file({"zero_stage": 3, "its_own_key": 1}))
    start("--cpu", "--config", file())
    assert [kind for kind, _, _ in started[-2:]] == ["zero", "simple"]
    assert started[-2][1].deepspeed_multinode_launcher == "pdsh"


KEYS = {
    "kernels": ["loss"],
    "compile": "blocks",
    "activation_checkpointing": {"blocks": True},
    "attention_backend": "auto",
    "checkpoint": {"memory": {"every": 7, "copies": 3, "job": "mine"}},
}
REFUSED = {
    r"deepspeed_multinode_launcher: pdsh .*machine_rank": (
        {"zero_stage": 3, "deepspeed_multinode_launcher": "pdsh"},
        MACHINES,
        (),
    ),
    r"unknown key 'deepspeed_config\.zero_stag'": ({"zero_stag": 3}, {}, ()),
    r"deepspeed_config\.activation_checkpointing.*--deepspeed_config_file ds\.json": (
        {"zero_stage": 3, "activation_checkpointing": {"blocks": True}},
        {},
        ("--deepspeed_config_file", "ds.json"),
    ),
}


def test_what_is_refused(file: Callable[..., str], started: Started) -> None:
    """A program called deepspeed; a key that Accelerate would drop; keys beside a file by flag."""
    for message, (section, changes, flags) in REFUSED.items():
        with pytest.raises(ConfigError, match=message):
            start(*flags, "--config", file(section, **changes))
    assert not started


def test_keys_that_accelerate_does_not_know_reach_the_plugin(
    file: Callable[..., str], started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("--config", file({"zero_stage": 3, **KEYS}))
    for name, value in started[0][2].items():
        if name.startswith(("ACCELERATE_DEEPSPEED", "HF_ZERO_")):
            monkeypatch.setenv(name, value)
    made = DeepSpeedPlugin().deepspeed_config
    assert {name: made[name] for name in KEYS} == KEYS and made["zero_optimization"]["stage"] == 3
    given = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}}).deepspeed_config
    assert not KEYS.keys() & given.keys()
    monkeypatch.setattr(finder, "chosen", lambda: False)
    assert not KEYS.keys() & DeepSpeedPlugin().deepspeed_config.keys()


def test_the_ranks_hear_of_the_folders_for_files(
    file: Callable[..., str], started: Started
) -> None:
    """Accelerate passes on the devices alone, by the file and by the flags."""
    optimizer = {"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/one"}
    param = {"offload_param_device": "nvme", "offload_param_nvme_path": "/two"}
    start("--config", file({"zero_stage": 3, **optimizer, **param}))
    start("--offload_param_nvme_path", "/three", "--config", file())
    start("--config", file())
    names = [f"ACCELERATE_DEEPSPEED_OFFLOAD_{what}_NVME_PATH" for what in ("OPTIMIZER", "PARAM")]
    told = [[found.get(name) for name in names] for _, _, found in started]
    assert told == [["/one", "/two"], [None, "/three"], [None, None]]


@pytest.mark.usefixtures("plain_process")
def test_ranks_that_would_train_apart_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a ``hf-zero launch`` without a stage; other launches, and models that are not trained, are
    prepared as they are.
    """
    accelerator, model = Accelerator(), torch.nn.Linear(2, 2)
    for by, ranks in ((None, "2"), ("hf-zero launch --preset zero2", "2"), ("hf-zero launch", "1")):
        with monkeypatch.context() as patch:
            patch.setenv("WORLD_SIZE", ranks)
            patch.setenv(LAUNCHED_BY, by) if by else patch.delenv(LAUNCHED_BY, raising=False)
            assert accelerator.prepare(model) is model
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(LAUNCHED_BY, "hf-zero launch")
    assert accelerator.prepare_model(model, evaluation_mode=True) is model
    said = "started 2 ranks without a stage.*`hf-zero launch --preset zero3 --ranks 2 -- "
    with pytest.raises(LaunchError, match=said):
        accelerator.prepare(model, torch.optim.SGD(model.parameters()))


def test_ranks_that_train_by_ddp_are_told_so_once(
    monkeypatch: pytest.MonkeyPatch, heard: list[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(LAUNCHED_BY, "hf-zero launch")
    for kind in (DistributedType.MULTI_CPU, DistributedType.FSDP, DistributedType.MULTI_GPU):
        for rank in range(2):
            ranks: Any = SimpleNamespace(
                num_processes=2, distributed_type=kind, is_main_process=rank == 0
            )
            prepare_without_zero(lambda *given: given, ranks, torch.nn.Linear(2, 2))
    said = "names no stage, so Accelerate trains by DDP and not under ZeRO; name a stage in"
    assert len(heard) == 2 and all(said in each for each in heard)
