"""Agents and the process that starts them, with small commands in place of torchrun; failures of
ranks as ``hf-zero launch`` repeats them, its exit codes, and the addresses on which it listens.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from hf_zero.distributed.torchrun import RendezvousStore, start_ranks_whole
from hf_zero.errors import LaunchError
from hf_zero.launch import launcher
from hf_zero.launch.front import carry_out
from hf_zero.launch.hosts import Host
from hf_zero.launch.plan import LaunchPlan, Start
from tests.helpers.cells import in_one_item
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
    assert "lost ended with code 255; sh could not reach it, or its connection broke" in said
    done = completed([sys.executable, "-m", "hf_zero.launch.agent"], timeout=300.0)
    assert done.returncode == 127, "an agent that gets no orders starts nothing"


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
        process.send_signal(signal.SIGHUP)  # at once, as from a terminal that closes
        _, err = process.communicate(timeout=300.0)
    finally:
        end_group(process)
    code, name = process.returncode - 128, err.partition("hf-zero: ")[2].partition(",")[0]
    assert code in (signal.SIGTERM, signal.SIGHUP) and name == signal.Signals(code).name, err
    assert all(gone(int(path.read_text())) for path in pids)


@pytest.mark.skipif(sys.platform != "linux", reason="what ends with its parent does on Linux")
@in_one_item(["closed", "SIGTERM twice", "killed"])
def test_an_agent_leaves_no_rank(ended: str) -> None:
    """Its command ends with 0 when terminated, and leaves a child behind."""
    line = "trap 'exit 0' TERM; sleep 3600 & echo $!; wait"
    command = [sys.executable, "-m", "hf_zero.launch.agent"]
    pipe = subprocess.PIPE
    agent = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    assert agent.stdin is not None and agent.stdout is not None
    try:
        order = {"command": ["bash", "-c", line], "environment": {}}
        agent.stdin.write(json.dumps(order) + "\n")
        agent.stdin.flush()
        left = int(agent.stdout.readline())
        (command_id,) = (each.pid for each in psutil.Process(agent.pid).children())
        if ended == "closed":
            agent.stdin.close()
        elif ended == "killed":
            agent.kill()
        else:
            for _ in range(2):
                agent.send_signal(signal.SIGTERM)
        code = agent.wait(300.0)
        assert gone(command_id) and code == (-signal.SIGKILL if ended == "killed" else 0)
        assert ended == "killed" or gone(left)
    finally:
        end_group(agent)
        with contextlib.suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)


def test_an_order_that_is_cut_off_starts_nothing() -> None:
    command = [sys.executable, "-m", "hf_zero.launch.agent"]
    done = completed(command, input='{"command": ["true"], "env', timeout=300.0)
    assert (done.returncode, done.stderr) == (127, "")


def test_a_reader_that_pauses_keeps_no_host_alive(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    line = f"echo $$ > {pid}; exec yes"
    process = subprocess.Popen(
        [sys.executable, "-c", FRONT, line],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        limit = time.monotonic() + 300.0
        while not pid.exists() or not pid.read_text().strip():
            assert time.monotonic() < limit and process.poll() is None
            time.sleep(0.05)
        time.sleep(1.0)  # the pipe is full
        process.send_signal(signal.SIGTERM)
        assert process.wait(300.0) == 128 + signal.SIGTERM and gone(int(pid.read_text()))
    finally:
        end_group(process)


def test_output_of_what_is_left_behind_is_cut_off_once(capfd: pytest.CaptureFixture[str]) -> None:
    starts = [on(name, "sleep 60 & echo $!; exit 0") for name in "abc"]
    begun = time.monotonic()
    try:
        assert carry_out(LaunchPlan(starts, None)) == 0
        said = capfd.readouterr()
        assert "a, b, c: a process left behind holds the output" in said.err
        assert time.monotonic() - begun < 60.0, "each waits its own seconds"
    finally:
        for line in said.out.splitlines():
            os.kill(int(line.split()[-1]), signal.SIGKILL)


def test_nohup_holds(tmp_path: Path) -> None:
    """A signal that is ignored as the launch begins stays ignored."""
    here, go = tmp_path / "here", tmp_path / "go"
    line = f"touch {here}; while ! [ -e {go} ]; do sleep 0.05; done; echo trained"
    process = subprocess.Popen(
        ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh", sys.executable, "-c", FRONT, line],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        limit = time.monotonic() + 300.0
        while not here.exists():
            assert time.monotonic() < limit and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGHUP)
        go.touch()
        out, _ = process.communicate(timeout=300.0)
    finally:
        end_group(process)
    assert (process.returncode, out) == (0, "trained\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_under_the_output_holds_up_no_rank() -> None:
    line = "i=0; while [ $i -lt 3000 ]; do echo " + "x" * 100 + "; i=$((i+1)); done; echo end >&2"
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", FRONT, line, line],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300.0,
        )
    assert done.stderr.count("the standard output cannot be written ([Errno 28] No space") == 1
    assert "[a] end" in done.stderr and "[b] end" in done.stderr


def test_a_program_that_reaches_no_host_is_named() -> None:
    start = Start(Host("far", (0,)), ["true"], {}, ["no-such-ssh", "far", "true"], here=False)
    with pytest.raises(LaunchError, match=r"far cannot be reached through no-such-ssh: .* --ssh"):
        carry_out(LaunchPlan([start, start], None))


LONG = "which says at length what else is to be known about it and what might be done, " * 2


WRONG = "ConfigError: stage = 7 is unknown"


TERM, ABRT, KILL = (-number for number in (signal.SIGTERM, signal.SIGABRT, signal.SIGKILL))
# exit code and error of each rank; the first of them, and its error as it is repeated
FAILURES: list[tuple[dict[int, tuple[int, str]], int, str]] = [
    ({3: (1, f"{WRONG}; write 0 to 3")}, 3, f" ({WRONG}; write 0 to 3)"),
    ({3: (1, f"{WRONG}; {LONG}")}, 3, f" ({WRONG})"),
    ({3: (1, f"ConfigError: it, {LONG}")}, 3, " (ConfigError)"),
    ({3: (1, "ConfigError: 3 mistakes:")}, 3, " (ConfigError: 3 mistakes)"),
    # a rank that follows another is not the first: it has lost one that left with its own code
    ({0: (1, ""), 1: (3, "")}, 1, ""),
    ({0: (TERM, ""), 1: (1, "")}, 1, ""),
    ({0: (1, ""), 1: (KILL, "")}, 1, ""),
    ({0: (ABRT, ""), 1: (1, ""), 2: (1, "")}, 1, ""),
    ({0: (1, ""), 1: (1, "")}, 0, ""),
    # of ranks with one error the lowest has printed it, and may be stopped while it ends
    ({0: (1, WRONG), 1: (1, WRONG)}, 0, f" ({WRONG})"),
    ({0: (TERM, WRONG), 1: (1, WRONG)}, 0, f" ({WRONG})"),
    ({0: (ABRT, WRONG), 1: (1, WRONG)}, 1, f" ({WRONG})"),
]


@in_one_item(FAILURES)
def test_the_first_failure_is_named_with_its_error_in_whole_sentences(case: Any) -> None:
    ranks, first, repeated = case
    failures = {
        rank: SimpleNamespace(
            error_file_data={"message": {"message": error} if error else "signal"},
            timestamp=10 - rank if error else 1,
            exitcode=code,
        )
        for rank, (code, error) in ranks.items()
    }
    assert launcher._first_failure(failures) == (first, failures[first], repeated)


def test_a_signal_keeps_its_exit_code_with_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(*_: Any, **__: Any) -> None:
        handled = os.environ[launcher.HANDLED].split(",")
        assert "SIGUSR1" in handled, "it would end torchrun, not its ranks"
        assert ("SIGHUP" in handled) is (hung_up is signal.SIG_DFL), "nohup"
        raise api.SignalException("got signal: 15", sigval=signal.SIGTERM)

    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(launcher.runpy, "run_module", ends)
    monkeypatch.setattr(dist, "TCPStore", dist.TCPStore)  # which main replaces in its process
    before = signal.getsignal(signal.SIGHUP)
    for shown, hung_up in (("0", signal.SIG_DFL), ("1", signal.SIG_IGN)):
        monkeypatch.setattr(sys, "argv", ["launcher.py", "torch.distributed.run"])
        monkeypatch.delenv(launcher.HANDLED, raising=False)
        signal.signal(signal.SIGHUP, hung_up)
        monkeypatch.setenv("HF_ZERO_TRACEBACK", shown)
        assert launcher.main() == 128 + signal.SIGTERM
        said = capsys.readouterr().err
        assert said.endswith("hf-zero launch: this launcher was ended by SIGTERM\n")
        assert ("Traceback" in said) is (shown == "1")
    signal.signal(signal.SIGHUP, before)


def test_a_launcher_without_a_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["launcher.py"])
    with pytest.raises(LaunchError, match=r"pass torch\.distributed\.run"):
        launcher.main()


def test_a_signal_while_ranks_are_started_leaves_none_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It arrives between the start of the first and of the second, as within one."""
    monkeypatch.setattr(api.SubprocessContext, "_start", api.SubprocessContext._start)
    start_ranks_whole()
    started: list[SubprocessHandler] = []

    def start(*args: Any, make: Any = api.get_subprocess_handler, **named: Any) -> Any:
        started.append(make(*args, **named))
        if len(started) == 1:
            signal.raise_signal(signal.SIGTERM)
        return started[-1]

    monkeypatch.setattr(api, "get_subprocess_handler", start)
    ranks = dict.fromkeys(range(2), ("-c", "import time; time.sleep(600)"))
    specs = api.DefaultLogsSpecs(str(tmp_path))
    context = api.SubprocessContext("train", sys.executable, ranks, {0: {}, 1: {}}, specs)
    handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in handled}
    try:
        with pytest.raises(api.SignalException):
            context.start()
        assert [rank.proc.poll() for rank in started] == [-signal.SIGTERM] * 2
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for rank in started:
            rank.proc.kill()
            rank.proc.wait()


LIMIT_SECONDS = 240.0
SCRIPT = """
import os, time
import torch.distributed as dist
import hf_zero
hf_zero.init_distributed()
dist.barrier(dist.new_group())
open(f"started{{dist.get_rank()}}", "w").close()
time.sleep({limit})
"""
ALL = {"0.0.0.0", "::"}


def listening(process: psutil.Process) -> dict[int, str]:
    """The ports at which ``process`` listens, and their addresses."""
    found = process.net_connections("tcp")
    return {each.laddr.port: each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}


@contextlib.contextmanager
def launched(folder: Path) -> Iterator[psutil.Process]:
    """``hf-zero launch`` of ``train.py`` in ``folder``, once its two ranks have met."""
    command = [sys.executable, "-c", "from hf_zero.cli import main; main()", "launch"]
    environ = {name: text for name, text in os.environ.items() if "SOCKET_IFNAME" not in name}
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            [*command, "--ranks", "2", "train.py"],
            cwd=folder,
            env=environ,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + LIMIT_SECONDS
        while not all((folder / f"started{rank}").exists() for rank in range(2)):
            assert process.poll() is None and time.monotonic() < end, (folder / "log").read_text()
            time.sleep(0.1)
        yield psutil.Process(process.pid)
    finally:
        for each in psutil.Process(process.pid).children(recursive=True):
            each.kill()  # ranks lead sessions of their own
        end_group(process)


@pytest.mark.skipif(sys.platform != "linux", reason="gloo takes the interface of an address")
def test_a_launch_on_one_host_listens_on_loopback_only(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(limit=2 * LIMIT_SECONDS))
    with launched(tmp_path) as launcher:
        addresses = [listening(each) for each in (launcher, *launcher.children(recursive=True))]
    assert addresses[0] and all(addresses[1:3]), "the store, and gloo in each rank"
    assert {ip for each in addresses for ip in each.values()} == {"127.0.0.1"}


def serve(address: str, port: int = 0) -> RendezvousStore:
    return RendezvousStore(
        address, port, None, True, timedelta(seconds=20), wait_for_workers=False, multi_tenant=True
    )


@in_one_item(
    [
        ("127.0.0.1", {"127.0.0.1"}),
        ("localhost", {"127.0.0.1"}),
        ("127.0.0.2", {"127.0.0.2"}),  # another address of this host, as of one network of many
        (socket.gethostname(), ALL),  # other hosts may resolve it to another address
    ]
)
def test_a_store_listens_on_the_address_of_the_rendezvous(case: tuple[str, set[str]]) -> None:
    address, expected = case
    store = serve(address)
    assert listening(psutil.Process())[store.port] in expected
    again = serve(address, store.port)  # as torchrun does for its ranks: the server is shared
    client = dist.TCPStore(address, store.port, is_master=False, timeout=timedelta(seconds=20))
    client.set("key", "value")
    assert again.get("key") == b"value"
