"""Hostfiles, filters and the variables that go along: what they mean, and every way in which
they can be wrong.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hf_zero.errors import LaunchError
from hf_zero.launch.hosts import Host, read_hostfile, select
from hf_zero.launch.plan import exported
from tests.helpers.cells import in_one_item

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


def test_variables_that_cannot_go_along(tmp_path: Path) -> None:
    file = tmp_path / "env"
    for asked, says in (
        ("UNSET", "--export UNSET: it is not set here"),
        ("1X=2", "'1X=2' is not NAME or NAME=VALUE"),
        ("A B", "'A B' is not"),
    ):
        with pytest.raises(LaunchError, match=says):
            exported({}, [asked])
    with pytest.raises(LaunchError, match="cannot be read"):
        exported({}, [], [file])
    file.write_text("A=1\nexport B\n")
    with pytest.raises(LaunchError, match="line 2: 'export B' is not NAME=VALUE"):
        exported({}, [], [file])
