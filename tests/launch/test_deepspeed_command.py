"""The deepspeed command line, translated, and the commands by which pdsh, srun and mpirun start a
script on several hosts.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hf_zero.deepspeed import launcher
from hf_zero.deepspeed import multinode_runner as runners
from hf_zero.deepspeed.launcher import main, parse_args
from hf_zero.errors import ConfigError, LaunchError, NotBuiltError
from hf_zero.launch.plan import LaunchPlan
from tests.helpers.cells import in_turn
from tests.helpers.commands import completed


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[LaunchPlan]:
    """Collect the launch plans instead of carrying them out."""
    plans: list[LaunchPlan] = []
    monkeypatch.setattr(launcher, "carry_out", lambda plan: plans.append(plan) or 0)
    monkeypatch.setattr(launcher, "DEFAULT_HOSTFILE", str(tmp_path / "job-hostfile"))
    monkeypatch.setattr(launcher, "_ranks_here", lambda: 2)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
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


def test_a_script_that_is_not_there_starts_no_rank(planned: list[LaunchPlan]) -> None:
    with pytest.raises(LaunchError, match=r"the script missing\.py is not in"):
        main(["missing.py"])
    assert not planned


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


POOL = {"worker-0": 4, "worker-1": 4}
SLOTS = {name: list(range(count)) for name, count in POOL.items()}
PYTHON = [sys.executable, "-u"]
ODD = "64(x2) $HOME 'a' \"b\""


def made(kind: Any, *options: str, pool: Any = POOL, script: str = "train.py") -> Any:
    return kind(parse_args([*options, script, "--text", "I'm here"]), "world", pool)


def test_hydra() -> None:
    for kind, own in (
        (runners.MPICHRunner, []),
        (runners.IMPIRunner, ["-genv", "I_MPI_PIN", "0"]),
        (runners.MVAPICHRunner, ["-genv", "MV2_ENABLE_AFFINITY", "0"]),
    ):
        command = made(kind, "--module", "--launcher_args", "-v -x").get_cmd({}, SLOTS)
        assert command[:9] == shlex.split("mpirun -n 8 -ppn 4 -hosts worker-0,worker-1 -v -x")
        assert command[-len(own) - 6 : -6] == own and command[-6:-3] == [*PYTHON, "-m"]
    with pytest.raises(ConfigError, match="equally many ranks"):
        made(kind, pool={"worker-0": 4, "worker-1": 2}).get_cmd({}, SLOTS)
    for option in (["--include", "worker-0"], ["--num_nodes", "1"]):
        with pytest.raises(ValueError, match=f"mvapich does not take {option[0]}"):
            made(kind, *option)


def test_slurm() -> None:
    runner = made(runners.SlurmRunner, "--include", "worker-1", "--slurm_comment", "mine")
    runner.add_export("NAME", "a,b c")
    environment: dict[str, str] = {}
    command = runner.get_cmd(environment, {"worker-1": [0, 1]})
    assert environment == {"NAME": "a,b c"}
    assert command == [
        *("srun", "-n", "2", "--comment", "mine", "--nodelist", "worker-1", "--nodes", "1"),
        "--export=ALL",
        *(*PYTHON, "train.py", "--text", "I'm here"),
    ]
    command = made(runners.SlurmRunner, "--num_nodes", "2", "--num_gpus", "4").get_cmd({}, SLOTS)
    assert command[3:7] == ["--nodes", "2", "--gpus-per-node", "4"] and command[2] == "8"
    assert made(runners.SlurmRunner).get_cmd({}, POOL)[2] == "8"
    with pytest.raises(ConfigError, match="no host is left"):
        runner.validate_active_resources({})
    for slots, said in (([1, 2], "cannot choose slots"), ([0], "equally many")):
        with pytest.raises(ConfigError, match=said):
            runner.validate_active_resources({"worker-0": slots, "worker-1": [0, 1]})


def test_pdsh_starts_the_part_of_each_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line that pdsh would pass to a shell on each host is one that the deepspeed command
    accepts.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my train.py").touch()
    where = ("--master_addr", "10.9.9.1", "--master_port", "99", "--ssh_port", "7")
    runner = made(runners.PDSHRunner, *where, script="my train.py")
    runner.add_export("NAME", ODD)
    environment = {"PDSH_SSH_ARGS_APPEND": "-q"}
    command, ending, changed = runner.get_cmd(environment, SLOTS)
    assert changed["PDSH_RCMD_TYPE"] == "ssh" and changed["PDSH_SSH_ARGS_APPEND"] == "-q -p 7"
    assert command[:6] == ["pdsh", "-S", "-f", "1024", "-w", "worker-0,worker-1"]
    line = " ".join(command[6:]).replace("%n", "1").replace("; ", " && ")
    echo = "import os, sys; print([os.environ['NAME'], os.getcwd(), *sys.argv[1:]])"
    line = line.replace("-u -m deepspeed.launcher.runner", f"-c {shlex.quote(echo)}")
    said = eval(completed(["sh", "-c", line]).stdout)
    assert said[:2] == [ODD, str(tmp_path)] and said[-3:] == ["my train.py", "--text", "I'm here"]
    plans: list[LaunchPlan] = []
    monkeypatch.setattr(launcher, "carry_out", plans.append)
    main(said[2:])
    assert plans[0].meeting == "10.9.9.1:99" and plans[0].alone
    words = plans[0].starts[0].command
    assert words[words.index("--node-rank") + 1] == "1"
    assert words[words.index("--nproc-per-node") + 1] == "4"
    pattern = shlex.split(ending[-1])[0].replace("%n", "1")
    assert ending[-3:-1] == ["pkill", "-f"]
    assert re.search(pattern, " ".join(command).replace("%n", "1"))
    with pytest.raises(ConfigError, match="equally many ranks"):
        runner.get_cmd({}, {"worker-0": [0], "worker-1": [0, 1]})


@in_turn("name", runners.RUNNERS)
def test_the_command_is_replaced_by_the_launchers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executed: list[Any] = []
    monkeypatch.setattr(os, "execvpe", lambda program, *rest: executed.append(rest))
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".deepspeed_env").write_text("NCCL_IB_DISABLE=1\n")
    hosts = tmp_path / "hosts"
    hosts.write_text("worker-0 slots=2\nworker-1 slots=2\n")
    run = ["--launcher", name, "--hostfile", str(hosts), "--launcher_args=-v", "train.py"]
    monkeypatch.setattr(shutil, "which", lambda program: None)
    with pytest.raises(LaunchError, match=f"--launcher {name}: its program is not installed"):
        main(run)
    monkeypatch.setattr(shutil, "which", lambda program: f"/usr/bin/{program}")
    main(run)
    ((command, environment),) = executed
    assert command[:3] == [command[0], "-n", "4"] and "-v" in command
    given = environment.items() if name == "slurm" else list(pairwise(command))
    split = [tuple(word.split("=")) for word in command]
    for pair in (("NCCL_IB_DISABLE", "1"), ("MASTER_ADDR", "worker-0"), ("MASTER_PORT", "29500")):
        assert pair in given or pair in split
    assert command[-3:] == [*PYTHON, "train.py"]
    for options, said in (([], "pass --hostfile"), (["-H", "/no/hosts"], "no such file")):
        with pytest.raises(LaunchError, match=said):
            main(["--launcher", name, *options, "train.py"])
