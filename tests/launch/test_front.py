"""Agents and the process that starts them, with small commands in place of torchrun; one ssh of
ours that stays on this machine.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_zero.launch.front import carry_out
from hf_zero.launch.hosts import Host
from hf_zero.launch.plan import LaunchPlan, Start
from tests.helpers.commands import completed, end_group

AGENT = f"exec {sys.executable} -m hf_zero.launch.agent"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


FRONT = f"""
import sys
from hf_zero.launch.front import carry_out
from hf_zero.launch.hosts import Host
from hf_zero.launch.plan import LaunchPlan, Start
def on(host, line):
    return Start(Host(host, (0,)), ["sh", "-c", line], {{}}, ["sh", "-c", {AGENT!r}], False)
hosts = [on(name, line) for name, line in zip("ab", sys.argv[1:])]
sys.exit(carry_out(LaunchPlan(hosts, None)))
"""


def on(host: str, line: str, agent: str = AGENT, **environment: str) -> Start:
    return Start(Host(host, (0,)), ["sh", "-c", line], environment, ["sh", "-c", agent], here=False)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pid: int, timeout: float = 300.0) -> bool:
    limit = time.monotonic() + timeout
    while alive(pid) and time.monotonic() < limit:
        time.sleep(0.05)
    return not alive(pid)


def test_each_line_has_its_host_before_it(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    starts = [
        on("a", 'printf "one\\ntwo"; printf "bar 1\\rbar 2\\r" >&2'),
        on("b", 'echo "$MARK"', MARK="$HOME 'x'"),
    ]
    assert carry_out(LaunchPlan(starts, None)) == 0
    out, err = capfdbinary.readouterr()
    assert sorted(out.splitlines()) == [b"[a] one", b"[a] two", b"[b] $HOME 'x'"]
    assert err == b"[a] bar 1\r[a] bar 2\r", "a progress bar still redraws, and stderr is stderr"


def test_the_first_failure_ends_the_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pid = tmp_path / "pid"
    starts = [
        on("good", "exit 0"),
        on("slow", f"echo $$ > {pid}; exec sleep 3600"),
        on("bad", f"while ! [ -s {pid} ]; do sleep 0.05; done; exit 9"),
    ]
    assert carry_out(LaunchPlan(starts, None)) == 9
    said = capfd.readouterr().err
    assert "hf-zero: bad ended with code 9; ending the other hosts" in said
    assert "to go on without one is started by torchrun --nnodes MIN:MAX" in said
    assert gone(int(pid.read_text()))


def test_what_hides_in_a_session_of_its_own_is_ended_too(tmp_path: Path) -> None:
    """The ranks of torchrun are such processes when torchrun itself is killed."""
    pid = tmp_path / "pid"
    hides = f"setsid sh -c 'echo $$ > {pid}; exec sleep 3600' & "
    hides += f"while ! [ -s {pid} ]; do sleep 0.05; done; kill -9 $$"
    assert carry_out(LaunchPlan([on("a", hides), on("b", "exec sleep 3600")], None)) == 137
    assert gone(int(pid.read_text()))


def test_a_host_that_is_deaf_is_cut_off(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    deaf = "trap '' TERM; while true; do sleep 1; done"
    starts = [on("deaf", "true", agent=deaf), on("bad", "exit 1")]
    assert carry_out(LaunchPlan(starts, None), patience=1.0) == 1
    assert "deaf did not end within 1 s" in capfd.readouterr().err


def test_a_host_that_cannot_be_reached(capfd: pytest.CaptureFixture[str]) -> None:
    starts = [
        on("lost", "true", agent="echo no route to host >&2; exit 255"),
        on("b", "exec sleep 3600"),
    ]
    assert carry_out(LaunchPlan(starts, None)) == 255
    said = capfd.readouterr().err
    assert "[lost] no route to host" in said
    assert "lost ended with code 255; ssh could not reach it, or its connection broke" in said
    done = completed([sys.executable, "-m", "hf_zero.launch.agent"], timeout=300.0)
    assert done.returncode == 127, "an agent that gets no orders starts nothing"


def test_one_host_needs_no_name(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert carry_out(LaunchPlan([on("far", "echo hello; exit 3")], None)) == 3
    out, err = capfdbinary.readouterr()
    assert out == b"hello\n" and b"far ended with code 3" in err
    start = Start(Host("a", (0,)), ["/no/such/python"], {}, ["sh", "-c", AGENT], here=False)
    assert carry_out(LaunchPlan([start], None)) == 127
    assert b"cannot start /no/such/python" in capfdbinary.readouterr().err
    # this machine alone is run in place
    ran: list[tuple[str, list[str], str]] = []
    execv = lambda program, words: ran.append((program, words, os.environ["MARK_OF_TEST"]))  # noqa: E731
    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setenv("MARK_OF_TEST", "")
    start = Start(Host("localhost", (0,)), ["py", "x"], {"MARK_OF_TEST": "1"}, [], here=True)
    carry_out(LaunchPlan([start], None))
    assert ran == [("py", ["py", "x"], "1")]


def test_a_signal_ends_all_and_is_told(tmp_path: Path) -> None:
    pids = [tmp_path / name for name in ("a", "b")]
    lines = [f"echo $$ > {pid}; exec sleep 3600" for pid in pids]
    process = subprocess.Popen(
        [sys.executable, "-c", FRONT, *lines],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        limit = time.monotonic() + 300.0
        while not all(path.exists() and path.read_text().strip() for path in pids):
            assert time.monotonic() < limit and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=300.0)
    finally:
        end_group(process)
    assert process.returncode == 128 + signal.SIGTERM and "SIGTERM, ending all hosts" in err
    assert all(gone(int(path.read_text())) for path in pids)
