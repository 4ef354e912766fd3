"""The deepspeed command line, translated."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hf_zero.deepspeed import launcher
from hf_zero.deepspeed.launcher import main
from hf_zero.errors import LaunchError, NotBuiltError
from hf_zero.launch.plan import LaunchPlan


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[LaunchPlan]:
    """Collect the launch plans instead of carrying them out."""
    plans: list[LaunchPlan] = []
    monkeypatch.setattr(launcher, "carry_out", lambda plan: plans.append(plan) or 0)
    monkeypatch.setattr(launcher, "DEFAULT_HOSTFILE", str(tmp_path / "job-hostfile"))
    monkeypatch.setattr(launcher, "_ranks_here", lambda: 2)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ZERO_LOG_LEVEL", "info")
    return plans


@pytest.fixture
def two_hosts(tmp_path: Path) -> str:
    file = tmp_path / "hosts"
    file.write_text("10.9.9.1 slots=4\n10.9.9.2 slots=4\n")
    return str(file)


def test_hosts_and_filters(planned: list[LaunchPlan], two_hosts: str, tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text("NCCL_IB_DISABLE=1\n")
    own = ["train.py", "--deepspeed", "--hostfile", "x"]
    chosen = ["--include", "10.9.9.1:0@10.9.9.2:1,3", "--master_port", "99"]
    main(["--hostfile", two_hosts, *chosen, *own])
    plan = planned.pop()
    assert plan.meeting == "10.9.9.1:99"
    assert [start.host.slots for start in plan.starts] == [(0,), (1, 3)]
    for start in plan.starts:
        assert start.command[-4:] == own
        assert "--local_rank" in " ".join(start.command)
        assert start.environment["NCCL_IB_DISABLE"] == "1"
    # each host starts its own part
    main(["-H", two_hosts, "--no_ssh", "--node_rank", "1", "train.py"])
    plan = planned.pop()
    assert plan.alone and plan.meeting == "10.9.9.1:29500"
    Path(two_hosts).rename(tmp_path / "job-hostfile")  # the default one
    main(["--num_nodes", "2", "train.py"])
    assert [start.host.name for start in planned[0].starts] == ["10.9.9.1", "10.9.9.2"]


def test_options_that_pdsh_appends_to_ssh(
    planned: list[LaunchPlan], two_hosts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-l me")
    start = ["--hostfile", two_hosts, "--master_addr", "10.9.9.1", "--ssh_port", "7"]
    for name, program, ends in (
        ("pdsh", "", ["-l", "me", "-p", "7"]),
        ("ssh", "", ["-p", "7"]),
        ("pdsh", "enter", ["enter", "-p", "7"]),
    ):
        monkeypatch.setenv("HF_ZERO_SSH", program)
        main([*start, "--launcher", name, "train.py"])
        for each in planned.pop().starts:
            *ssh, host, _ = each.reached_by
            assert host == each.host.name and ssh[-len(ends) :] == ends
            assert ("me" in ssh) is ("me" in ends)


def test_numbers_and_plain_local_ranks(planned: list[LaunchPlan]) -> None:
    main(["--num_gpus", "3", "--no_local_rank", "--module", "pkg.train", "-x"])
    main(["train.py"])
    counted, plain = (plan.starts[0].command for plan in planned)
    assert counted[counted.index("--nproc-per-node") + 1] == "3"
    assert counted[-4:] == ["--module", "--", "pkg.train", "-x"]
    assert plain[plain.index("--nproc-per-node") + 1] == "2"


def test_what_is_refused_plans_nothing(planned: list[LaunchPlan]) -> None:
    for number in ("--num_nodes", "--num_gpus"):
        for hosts in ("--include", "--exclude"):
            with pytest.raises(ValueError, match="cannot be given with --include or --exclude"):
                main([number, "1", hosts, "localhost", "train.py"])
    with pytest.raises(LaunchError, match=r"/no/such/hosts cannot be read"):
        main(["--hostfile", "/no/such/hosts", "train.py"])
    for arguments, name in (
        ("--autotuning run", "--autotuning"),
        ("--save_pid", "--save_pid"),
        ("--bind_cores_to_rank", "--bind_cores_to_rank"),
        ("--launcher_args=-v", "--launcher_args"),
        ("--launcher openmpi --enable_each_rank_log logs", "--enable_each_rank_log"),
        ("--launcher none", "--launcher none"),
    ):
        with pytest.raises(NotBuiltError, match=f"{name}.* is not built"):
            main([*arguments.split(), "train.py"])
    assert not planned


def test_how_much_is_said_and_a_log_of_each_rank(
    planned: list[LaunchPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    for flag, level in (("-q", "error"), ("--log_level debug", "debug"), ("", "info")):
        monkeypatch.setenv("HF_ZERO_LOG_LEVEL", "")
        monkeypatch.delenv("HF_ZERO_LOG_LEVEL")
        main([*flag.split(), "train.py"])
        assert os.environ["HF_ZERO_LOG_LEVEL"] == level
    planned.clear()
    main(["--enable_each_rank_log", "logs", "train.py"])
    command = planned[0].starts[0].command
    assert command[command.index("--log-dir") :][:4] == ["--log-dir", "logs", "--tee", "3"]
    monkeypatch.setattr(launcher, "carry_out", lambda plan: 7)
    with pytest.raises(SystemExit, match=r"^7$"):
        main(["train.py"])
