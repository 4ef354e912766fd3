"""The plan of a launch: hostfiles, filters, the command of each host, and the way to reach it."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_zero.errors import LaunchError
from hf_zero.launch import hosts
from hf_zero.launch import plan as planning
from hf_zero.launch.hosts import SSH, Host, address_of, is_here, read_hostfile, select, ssh_command
from hf_zero.launch.plan import LaunchPlan, Request, exported, plan
from tests.helpers.cells import in_one_item
from tests.helpers.commands import completed


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (hosts.VARIABLE, "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)


PART = {"node_rank": 0, "num_nodes": 2}


def hostfile(folder: Path, *lines: str) -> Path:
    path = folder / "hosts"
    path.write_text("\n".join(lines))
    return path


def made(script: str = "train.py", *arguments: str, ranks: int = 2, **options: Any) -> LaunchPlan:
    return plan(Request(script, arguments, **options), lambda: ranks)


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_hosts_are_reached_through_the_ssh_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "it's here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", "/a b:/c")
    monkeypatch.setenv("HF_HOME", "$HOME/x")
    file = hostfile(tmp_path, "10.9.9.1 slots=1", "127.0.0.1 slots=1")
    more = {"interface": "eth7", "export": ("A=1",)}
    planned = made(hostfile=file, ssh="enter --now", ssh_port=2222, **more)
    far, near = planned.starts
    *program, line = far.reached_by
    assert program == ["enter", "--now", "-p", "2222", "10.9.9.1"] and not far.here
    words = shlex.split(line)
    assert words[:5] == ["cd", str(folder), "&&", "exec", "env"]
    assert words[5:] == ["PYTHONPATH=/a b:/c", sys.executable, "-m", "hf_zero.launch.agent"]
    assert near.here and near.reached_by == ["sh", "-c", line]
    order = json.loads(far.order)
    assert order["command"] == far.command
    expected = {"HF_HOME": "$HOME/x", "A": "1", "HF_ZERO_HOST": "10.9.9.1"}
    expected |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "eth7")
    assert expected.items() <= order["environment"].items()
    assert far.order.endswith(b"\n") and far.order.count(b"\n") == 1
    assert planned.meeting is not None and planned.meeting.startswith("10.9.9.1:")
    assert int(planned.meeting.rpartition(":")[2]) in planning.PORTS


def test_the_ssh_program(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ssh_command() == shlex.split(SSH) and "BatchMode=yes" in SSH
    monkeypatch.setenv(hosts.VARIABLE, "/bin/my ssh".replace(" ", "\\ ") + " -v")
    assert ssh_command() == ["/bin/my ssh", "-v"]
    assert ssh_command("other") == ["other"]
    with pytest.raises(LaunchError, match="cannot be read as a command"):
        ssh_command("'open")


def test_accelerate_launch_gets_its_machine(tmp_path: Path) -> None:
    from accelerate.commands.launch import launch_command_parser

    file = hostfile(tmp_path, "10.9.9.1 slots=2", "10.9.9.2 slots=2")
    accelerate = ("--use_deepspeed", "--zero_stage", "3")
    given = {"hostfile": file, "accelerate": accelerate, "master_port": 99}
    planned = made("train.py", "--config", "x", **given)
    for rank, start in enumerate(planned.starts):
        args = launch_command_parser().parse_args(start.command[4:])
        assert (args.num_machines, args.machine_rank, args.num_processes) == (2, rank, 4)
        assert args.main_process_port == 99
        assert (args.main_process_ip, args.training_script_args) == ("10.9.9.1", ["--config", "x"])
    more = {"master_port": 99, "module": True, "log_dir": Path("logs")}
    alone = made(accelerate=("--use_deepspeed",), **more)
    command = alone.starts[0].command
    assert option(command, "--log_dir") == "logs" and option(command, "--tee") == "3"
    args = launch_command_parser().parse_args(command[4:])
    assert (args.main_process_ip, args.main_process_port, args.module) == ("127.0.0.1", 99, True)
    file = hostfile(tmp_path, "10.9.9.1 slots=2", "10.9.9.2 slots=3")
    said = r"equally many ranks on every host \(10.9.9.1: 2, 10.9.9.2: 3\); pass --num-procs"
    with pytest.raises(LaunchError, match=said):
        made(hostfile=file, accelerate=("--use_deepspeed",))


NODE = {"node_rank": 0, "master_addr": "127.0.0.1", "master_port": 99}


def test_accelerate_launch_starts_as_many_ranks_as_torchrun(tmp_path: Path) -> None:
    """By a preset, and by a file if an option counts or selects the ranks."""
    from accelerate.commands.launch import launch_command_parser

    hosts = {"hostfile": hostfile(tmp_path, "localhost slots=4")}
    for options, machines, ranks, devices in (
        ({}, 1, 2, ""),
        ({"num_procs": 3}, 1, 3, ""),
        (hosts, 1, 4, ""),
        ({**hosts, "num_procs": 3}, 1, 3, "0,1,2"),
        ({**hosts, "include": "localhost:1"}, 1, 1, "1"),
        ({"include": "localhost:0"}, 1, 1, "0"),
        ({"exclude": "localhost:0"}, 1, 1, "1"),
        ({**NODE, "num_procs": 3}, 1, 3, ""),
        ({**NODE, "num_procs": 3, "num_nodes": 2}, 2, 6, ""),
        ({**NODE, "include": "localhost:1", "num_nodes": 2}, 2, 2, "1"),
        ({**NODE, "exclude": "localhost:1"}, 1, 1, "0"),
    ):
        command = made(**options).starts[0].command
        assert option(command, "--nproc-per-node") == str(ranks // machines)
        for of_file in (None, "1"):
            more = {"accelerate": ("--use_deepspeed",), "machines_of_file": of_file}
            (start,) = made(**options, **more).starts
            args = launch_command_parser().parse_args(start.command[4:])
            counted = (args.num_machines, args.num_processes)
            expected = (machines, ranks) if options or of_file is None else (None, None)
            assert counted == expected, options
            port = 99 if "master_port" in options else 0 if of_file is None else None
            assert args.main_process_port == port, options
            assert start.environment.get("CUDA_VISIBLE_DEVICES", "") == devices


def test_ranks_are_not_counted_for_one_of_the_machines_of_a_file() -> None:
    several = {"accelerate": ("--config_file", "x.yaml"), "machines_of_file": "2"}
    assert "--num_machines" not in made(**several).starts[0].command
    for counts in ({"num_procs": 2}, {"include": "localhost:0"}, NODE):
        with pytest.raises(LaunchError, match="num_machines = 2"):
            made(**several, **counts)
    assert made(**several, **NODE, num_nodes=2).alone


@in_one_item(
    [
        ({"num_nodes": 2}, "--num-nodes 2 needs --hostfile"),
        ({"num_nodes": 0}, "--num-nodes 0"),
        ({**NODE, "num_nodes": -1}, "--num-nodes -1"),
        ({**NODE, "include": "localhost:2"}, "--include 'localhost:2'"),
        ({**NODE, "exclude": "worker-1"}, "--exclude 'worker-1'"),
        ({**NODE, "include": "localhost", "num_procs": 1}, "--include and --num-procs"),
        ({"num_procs": 0}, "--num-procs 0 is not a number of ranks"),
        ({"master_port": 70000}, "--master-port 70000 is not a port"),
        ({**PART, "node_rank": 2, "master_addr": "a", "master_port": 1}, "there are 2 host"),
        ({**PART, "master_port": 1}, "needs --master-addr"),
        ({**PART, "master_addr": "a"}, "needs --master-port"),
        ({"module": True, "no_python": True}, "--module and --no-python cannot"),
        ({"export": ("NOT_SET_HERE",)}, "--export NOT_SET_HERE"),
    ]
)
def test_what_cannot_be_planned(case: tuple[dict[str, Any], str]) -> None:
    options, says = case
    with pytest.raises(LaunchError, match=says.replace("(", r"\(")):
        made(**options)


def test_the_devices_of_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine slots index the visible devices."""
    one = {"hostfile": hostfile(tmp_path, "localhost slots=4")}
    pair = {**PART, "master_addr": "10.9.9.1", "master_port": 99}
    for visible, options, devices in (
        (None, {**one, "include": "localhost:1,3"}, "1,3"),
        ("2,3", {**one, "num_procs": 1}, "2"),
        ("GPU-aa, GPU-bb", {**one, "include": "localhost:1"}, "GPU-bb"),
        ("2,3", {**pair, "include": "localhost:1"}, "3"),
        ("", {**one, "num_procs": 2}, ""),
        ("-1", {**one, "num_procs": 2}, "-1"),
    ):
        monkeypatch.delenv(planning.VISIBLE, raising=False)
        if visible is not None:
            monkeypatch.setenv(planning.VISIBLE, visible)
        assert made(**options).starts[0].environment[planning.VISIBLE] == devices, visible
    for visible, options in (
        ("2,3", {**one, "num_procs": 3}),
        ("2,3,-1,4", {**one, "num_procs": 3}),
        ("GPU-aa,GPU-bb", {**one, "include": "localhost:0,2"}),
        ("5", {**pair, "include": "localhost:1"}),
    ):
        monkeypatch.setenv(planning.VISIBLE, visible)
        with pytest.raises(LaunchError, match=f"{planning.VISIBLE}={visible}"):
            made(**options)


def test_the_local_rank_as_the_deepspeed_launcher_passes_it(tmp_path: Path) -> None:
    script = tmp_path / "shows.py"
    script.write_text("import sys; print(sys.argv[1:])")
    own = ["--name", "two words", "$HOME"]
    command = made(str(script), *own, local_rank_argument=True).starts[0].command
    at = command.index("sh")
    assert command[at - 2 : at] == ["--no-python", "--"]
    said = completed(command[at:], env={**os.environ, "LOCAL_RANK": "5"}, check=True).stdout
    assert said.strip() == str(["--local_rank=5", *own])


def told(folder: Path, text: str) -> list[str]:
    """An ssh program that answers so."""
    script = folder / "ssh"
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o755)
    return [str(script)]


def test_a_host_tells_its_address_where_its_name_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(map(is_here, ("localhost", "127.0.0.1", "127.0.0.9", socket.gethostname())))
    assert not any(map(is_here, ("192.0.2.1", "no-such-host.invalid")))
    ssh = told(tmp_path, 'echo "10.1.2.3 fe80::1 $1 $2" ; echo warning >&2')
    assert address_of("192.0.2.7", ssh) == "192.0.2.7"
    assert address_of("no-such-host.invalid", ssh) == "10.1.2.3"
    known = {"both": ["fd00::1", "10.4.4.4"], "own": ["127.0.1.1"]}
    look_up = lambda host, *rest, **more: [(0, 0, 0, "", (each, 0)) for each in known[host]]  # noqa: E731
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(hosts, "is_here", lambda host: False)
    assert address_of("both", ssh) == "10.4.4.4"
    assert address_of("own", ssh) == "10.1.2.3", "what is loopback here is loopback there"


def test_other_hosts_are_not_sent_to_their_own_loopback(tmp_path: Path) -> None:
    ssh = told(tmp_path, "exit 1")
    (tmp_path / "bin").mkdir()
    Path(*told(tmp_path / "bin", "echo 10.1.2.3")).rename(tmp_path / "bin" / "hostname")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        for first in ("127.0.0.1", "::1", "127.0.0.9", "localhost"):
            file = hostfile(tmp_path, f"{first} slots=1", "10.9.9.2 slots=1")
            given: dict[str, Any] = {"hostfile": file, "ssh": ssh[0], "master_port": 99}
            assert made(**given).meeting == "10.1.2.3:99"
            with pytest.raises(LaunchError, match=f"--master-addr {first}"):
                made(**given, master_addr=first)
            with pytest.raises(LaunchError, match="--node-rank needs --master-addr"):
                made(**given, node_rank=1)
            assert made(**given, node_rank=1, master_addr="10.9.9.1").meeting == "10.9.9.1:99"
    file = hostfile(tmp_path, "127.0.0.2 slots=1", "127.0.0.3 slots=1")
    for more in ({}, {"node_rank": 1}, {"master_addr": "127.0.0.2"}):
        planned = made(hostfile=file, master_port=99, **more)
        assert planned.meeting == "127.0.0.2:99", "all are this machine"


def test_a_host_that_cannot_be_asked(tmp_path: Path) -> None:
    for text, says in (
        ("echo no route >&2; exit 255", "ended with 255: 'no route'"),
        ("exit 0", "does not tell its address"),
    ):
        said = rf"no-such-host.invalid.*{says}[\s\S]*--master-addr"
        with pytest.raises(LaunchError, match=said):
            address_of("no-such-host.invalid", told(tmp_path, text))
    with pytest.raises(LaunchError, match=r"no-such-host.invalid cannot be asked.*--master-addr"):
        address_of("no-such-host.invalid", [str(tmp_path / "missing")])


HOSTS = [Host("worker-0", (0, 1, 2, 3)), Host("worker-1", (0, 1)), Host("10.0.0.3", (0,))]


def slots(hosts: list[Host]) -> dict[str, list[int]]:
    return {host.name: list(host.slots) for host in hosts}


def write(folder: Path, text: str) -> Path:
    path = folder / "hosts"
    path.write_text(text)
    return path


def test_a_hostfile_as_deepspeed_writes_it(tmp_path: Path) -> None:
    hosts = "worker-0 slots=4\n  worker-1\tslots=2   # half of it\n10.0.0.3 slots = 1\n"
    assert read_hostfile(write(tmp_path, f"# the cluster\n\n{hosts}")) == HOSTS


def test_a_line_that_is_wrong_is_named(tmp_path: Path) -> None:
    for text, says in (
        ("", ["lists no host"]),
        ("a slots=1\nb\n", ["line 2: 'b' is not `host slots=N`"]),
        ("a slots=two", ["line 1", "slots=two"]),
        ("a slots=1 max_slots=2", ["line 1", "max_slots"]),
        ("a slots=0", ["line 1", "no slot"]),
        ("a slots=99999999999999", ["line 1", "more than 4,096 slots"]),
        ("a slots=1\n\nb slots=1\na slots=2\n", ["line 4: a is in line 1 already"]),
        ("-oProxyCommand=x slots=1", ["line 1", "not a host name"]),
        ("me@a slots=1", ["line 1", "not a host name", "--ssh"]),
        ("$(touch/x) slots=1", ["line 1", "not a host name"]),
        (f"{'a' * 64} slots=1", ["line 1", "not a host name"]),
        (f"{'a.' * 150}b slots=1", ["line 1", "not a host name"]),
        ("a\u202eb slots=1", ["line 1", r"'a\u202eb' is not a host name"]),
    ):
        path = write(tmp_path, text)
        with pytest.raises(LaunchError) as raised:
            read_hostfile(path)
        said = str(raised.value)
        assert all(part in said for part in (str(path), *says)), said
    # one that is not there is never one process
    for name, why in (("missing", "No such file"), (".", "Is a directory")):
        with pytest.raises(LaunchError, match=rf"the hostfile .* cannot be read \({why}"):
            read_hostfile(tmp_path / name)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(LaunchError, match="it is no file of text"):
        read_hostfile(tmp_path / "pipe")


@in_one_item(
    [
        ({}, {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1], "10.0.0.3": [0]}),
        ({"include": "worker-0@worker-1:1"}, {"worker-0": [0, 1, 2, 3], "worker-1": [1]}),
        ({"include": "worker-1:1,0@worker-0:2"}, {"worker-0": [2], "worker-1": [0, 1]}),
        ({"include": "worker-0:1@worker-0:3"}, {"worker-0": [1, 3]}),
        ({"exclude": "worker-1:0,1"}, {"worker-0": [0, 1, 2, 3], "10.0.0.3": [0]}),
        ({"num_nodes": 2, "num_procs": 1}, {"worker-0": [0], "worker-1": [0]}),
    ]
)
def test_what_is_left_of_the_hosts(case: tuple[dict, dict[str, list[int]]]) -> None:
    options, left = case
    chosen = select(HOSTS, **options)
    assert slots(chosen) == left
    assert list(left) == [host.name for host in chosen], "in the order of the hostfile"
    whole = {host.name: host.slots for host in HOSTS}
    assert all(host.chosen == (host.slots != whole[host.name]) for host in chosen)


@in_one_item(
    [
        ({"include": "worker-9"}, ["no host 'worker-9'", "worker-0, worker-1, 10.0.0.3"]),
        ({"exclude": "worker-1:0,7,8"}, ["not 7, 8"]),
        ({"include": "worker-0:"}, ["'worker-0:' is not HOST or HOST:SLOT,SLOT"]),
        ({"include": "worker-0@@worker-1"}, ["'' is not"]),
        ({"exclude": "worker-0@worker-1@10.0.0.3"}, ["leaves no host"]),
        ({"include": "worker-0", "exclude": "worker-1"}, ["--include and --exclude cannot be"]),
        ({"include": "worker-0", "num_nodes": 1}, ["--include and --num-nodes cannot"]),
        ({"num_nodes": 4}, ["--num-nodes 4: there are 3 host(s)"]),
        ({"num_nodes": 0}, ["--num-nodes 0"]),
        ({"num_procs": 2}, ["--num-procs 2", "10.0.0.3 1 slot(s)"]),
        ({"num_procs": 0}, ["--num-procs 0"]),
    ]
)
def test_a_choice_that_cannot_be_is_an_error(case: tuple[dict, list[str]]) -> None:
    options, says = case
    with pytest.raises(LaunchError) as raised:
        select(HOSTS, **options)
    assert all(part in str(raised.value) for part in says), str(raised.value)


def test_variables_that_go_along(tmp_path: Path) -> None:
    go_along = {"NCCL_DEBUG": "INFO", "HF_HOME": "/h", "PYTHONPATH": "a:b"}
    stay = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1", "MINE": "x=y", "RANK": "3"}
    here = go_along | stay
    file = tmp_path / ".deepspeed_env"
    file.write_text("# for all\n\nFROM_FILE = a b\nHF_HOME=/elsewhere\n")
    assert exported(here) == go_along
    asked = {"MINE": "x=y", "NEW": "1=2", "EMPTY": ""}
    own = exported(here, ["MINE", "NEW=1=2", "EMPTY="], [file])
    assert own == go_along | {"HF_HOME": "/elsewhere", "FROM_FILE": "a b"} | asked


def test_a_variable_that_is_asked_for_on_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The families are in the environment of its ranks anyway."""
    monkeypatch.setenv("MINE", "x=y")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    (start,) = made(export=("MINE",)).starts
    assert start.environment["MINE"] == "x=y" and "NCCL_DEBUG" not in start.environment
    with pytest.raises(LaunchError, match="--export UNSET: it is not set here"):
        made(export=("UNSET",))


def test_variables_that_cannot_go_along(tmp_path: Path) -> None:
    file = tmp_path / "env"
    for asked, says in (
        ("UNSET", "--export UNSET: it is not set here"),
        ("1X=2", "'1X=2' is not NAME or NAME=VALUE"),
        ("A B", "'A B' is not"),
    ):
        with pytest.raises(LaunchError, match=says):
            exported({}, [asked])
    with pytest.raises(LaunchError, match=f"{file} cannot be read"):
        exported({}, [], [file])
    file.write_bytes(b"A=\xff\n")
    with pytest.raises(LaunchError, match=f"{file} cannot be read"):
        exported({}, [], [file])
    file.write_text("A=1\nexport B\n")
    with pytest.raises(LaunchError, match="line 2: 'export B' is not NAME=VALUE"):
        exported({}, [], [file])
