"""A script started on two hosts, against one process."""

import os
import re
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from hf_zero.launch.hosts import free_port
from tests.helpers.hosts import NAMESPACES, two_hosts
from tests.helpers.launched import ended, environment, reports, running
from tests.matrix.scripts import hosts_train

TRAIN = Path(hosts_train.__file__)
CLI = [sys.executable, "-c", "from hf_zero.cli import main; main()", "launch"]


@pytest.fixture
def hosts(tmp_path):
    with two_hosts(tmp_path) as made:
        yield made


def said(folder, name="log"):
    return (folder / f"{name}.txt").read_text()


def started(command, folder, extra=None, name="log"):
    """A command with its output in a file; its ranks are interpreters of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    environ = {**environment(), "PYTHON_EXEC": sys.executable, **(extra or {})}
    return running(command, folder, folder / f"{name}.txt", environ)


def until(process, condition, *where):
    limit = time.monotonic() + 120.0
    while not condition():
        assert time.monotonic() < limit and process.poll() is None, said(*where)[-8000:]
        time.sleep(0.1)


def over(hosts, folder, *arguments, options=(), **extra):
    """The reports of the training script, by ``hf-zero launch --hostfile``."""
    folder.mkdir(exist_ok=True)
    command = [*CLI, "--hostfile", str(hosts.hostfile(folder / "hosts", 1)), *options]
    given = [str(TRAIN), "--out", str(folder), *arguments]
    with started([*command, *given], folder, {**hosts.environment(), **extra}) as process:
        code = ended(process, 300.0)
    assert code == 0, f"ended with {code}\n{said(folder)[-8000:]}"
    return reports(folder, 2)


def test_two_hosts_are_one_job(hosts, tmp_path):
    folder = tmp_path / "run dir"
    odd = 'it\'s $HOME; "two words" & *'
    extra = {"MARK": f"a=b {odd}", "HF_TOKEN": "hush-hush"}
    found = over(hosts, folder, "--odd", odd, options=["--export", "MARK"], **extra)
    plain = hosts_train.alone()
    means = [sum(each) / 2 for each in zip(*(report["losses"] for report in found), strict=True)]
    assert means == pytest.approx(plain["losses"], rel=1e-5)
    for report in found:
        assert report["weights"].keys() == plain["weights"].keys()
        for name, values in plain["weights"].items():
            want, got = torch.tensor(values), torch.tensor(report["weights"][name])
            assert (got - want).norm() <= 1e-5 * want.norm(), name
    places, log = [report["place"] for report in found], said(folder)
    assert [place["RANK"] for place in places] == ["0", "1"]
    assert {place["LOCAL_RANK"] for place in places} == {"0"}
    assert {place["MASTER_ADDR"] for place in places} == {hosts.addresses[0]}
    assert len({place["MASTER_PORT"] for place in places}) == 1
    for place in places:  # two shells have left them as they were
        assert place["argv"][-1] == odd and place["MARK"] == f"a=b {odd}"
    for rank, name in enumerate(hosts.names):
        assert f"[{name}] rank {rank} is done\n" in log
    assert "hush-hush" not in log
    if hosts.kind == NAMESPACES:
        assert tuple(place["address"] for place in places) == hosts.addresses
        assert [place["addresses"] for place in places] == [list(hosts.addresses)] * 2
        assert tuple(place["GLOO_SOCKET_IFNAME"] for place in places) == hosts.devices
        assert set(hosts.entered.read_text().split()) == set(hosts.names)
    else:
        assert {place["GLOO_SOCKET_IFNAME"] for place in places} == {"lo"}


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.long
def test_a_host_that_is_cut_off_is_named_on_both_sides(hosts, tmp_path):
    """In the middle of a step.

    Each host's part is started by itself, so that nobody ends the slower one before it has spoken.
    """
    namespaces, out, lost = hosts.kind == NAMESPACES, tmp_path / "run", 0
    meeting = ["--master-addr", hosts.addresses[0], "--master-port", str(free_port())]
    stepping = [out / f"stepping-{rank}" for rank in (0, 1)]
    with ExitStack() as stack:
        parts = []
        for place in (0, 1):
            options = ["--node-rank", str(place), "--num-nodes", "2", "--num-procs", "1", *meeting]
            given = [str(TRAIN), "--out", str(out), "--until-lost", "15.0"]
            command = hosts.inside(place, [*CLI, *options, *given])
            name = {"HF_ZERO_HOST": hosts.names[place]}
            parts.append(stack.enter_context(started(command, out, name, f"log-{place}")))
        # a rank leads a session of its own, and one that is stopped ends by no other means
        stack.callback(kill_all, stepping)
        for place, file in enumerate(stepping):
            until(parts[place], lambda file=file: numbers(file), out, f"log-{place}")
        if namespaces:
            hosts.cut(lost)
        else:
            os.kill(*numbers(stepping[lost]), signal.SIGSTOP)
        for place in (0, 1) if namespaces else (1 - lost,):
            assert ended(parts[place], 180.0) not in (0, None), said(out, f"log-{place}")
            peer = 1 - place
            # as that rank sees it: all loopback addresses are reached from one
            address = hosts.addresses[peer] if namespaces else "127.0.0.1"
            wanted = f".*rank {peer} on {re.escape(f'{hosts.names[peer]} ({address})')}"
            log = said(out, f"log-{place}")
            assert re.search(rf"ERROR rank {place}\] {wanted}", log), log[-6000:]


def numbers(*files):
    """The process ids that are written by now."""
    return [int(file.read_text()) for file in files if file.exists() and file.read_text()]


def kill_all(files):
    for pid in filter(alive, numbers(*files)):
        os.kill(pid, signal.SIGKILL)
