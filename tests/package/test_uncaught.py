"""An error of hf-zero ends a rank with its message alone, once for all ranks."""

from __future__ import annotations

import re
import socket
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
from torch.distributed import DistNetworkError, HashStore, TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from hf_zero.distributed import uncaught
from hf_zero.errors import ConfigError, RankMismatchError
from hf_zero.launch import launcher
from tests.helpers.cells import in_turn
from tests.helpers.commands import completed
from tests.helpers.launched import environment, python

# Forks of the server of Pythons leave its modules uncollected, which Triton 3.9 reports.
LEAKS = re.compile(r"nanobind: leaked.*?refleaks\.html", re.DOTALL)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Collect the errors that a hook set before ours receives."""
    errors: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: errors.append(error))
    for name in ("TORCHELASTIC_USE_AGENT_STORE", uncaught.SWITCH, "RANK"):
        monkeypatch.delenv(name, raising=False)
    return errors


def end_with(error: BaseException) -> None:
    try:
        raise error
    except BaseException as caught:
        sys.excepthook(type(caught), caught, caught.__traceback__)


def test_a_rank_says_what_is_wrong_and_where(seen, monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", "0")
    end_with(ConfigError("config dict: unknown key 'stge'"))
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "hf-zero, rank 0: ConfigError: config dict: unknown key 'stge'"
    assert len(said) == 3
    assert said[1].startswith(f"  at {__file__}:")
    assert said[2] == "  (hf-zero docs ConfigError; HF_ZERO_TRACEBACK=1 shows the traceback)"
    for set_rank in (lambda: monkeypatch.setenv("RANK", "x"), lambda: monkeypatch.delenv("RANK")):
        set_rank()  # no number, or no launcher
        end_with(ConfigError("wrong"))
        assert capsys.readouterr().err.startswith("hf-zero: ConfigError: wrong\n")
    assert seen == []


def test_errors_of_others_that_have_a_known_cause_are_told_by_it(seen, monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", "0")
    explained = ConfigError("rank 1 has ended")
    monkeypatch.setattr(uncaught, "explanations", [lambda error: None, lambda error: explained])
    end_with(RuntimeError("connection closed by peer"))
    said = capsys.readouterr().err
    assert "ConfigError: rank 1 has ended" in said and "Traceback" not in said and seen == []
    assert "because of RuntimeError: connection closed by peer" in said


def test_the_traceback_is_there_if_it_is_asked_for(seen, monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", "0")
    for value, shown in (("0", False), ("1", True)):
        monkeypatch.setenv(uncaught.SWITCH, value)
        end_with(ConfigError("wrong"))
        assert bool(seen) is shown and ("wrong" in capsys.readouterr().err) is not shown
    end_with(mine := ValueError("the script's"))
    assert seen[1:] == [mine]


def test_a_hook_that_calls_the_one_it_found_does_not_go_round(seen, monkeypatch, capsys) -> None:
    """torch sets such a one when a process group is made."""
    monkeypatch.setenv("RANK", "0")
    ConfigError("before the group")
    found = sys.excepthook
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: found(kind, error, trace))
    ConfigError("after it")
    end_with(ValueError("the script's"))
    assert len(seen) == 1 and capsys.readouterr().err == ""


def test_ranks_say_one_mistake_once_and_others_by_each(seen, monkeypatch, capsys) -> None:
    store = HashStore()
    monkeypatch.setattr(uncaught, "connect_to_agent_store", lambda timeout: store)
    monkeypatch.setattr(uncaught, "WAIT_SECONDS", 0.0)
    for rank, text in (("0", "wrong"), ("1", "wrong"), ("1", "wrong here"), ("2", "wrong here")):
        monkeypatch.setenv("RANK", rank)
        end_with(ConfigError(text))
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hf-zero")]
    assert said == [
        "hf-zero, rank 0: ConfigError: wrong",
        "hf-zero, rank 1: ConfigError: wrong here",
    ]


def test_a_text_of_an_earlier_attempt_is_printed_again(seen, monkeypatch, capsys) -> None:
    """The agents have not counted the restart, or the ranks have met under another token."""
    store = HashStore()
    monkeypatch.setattr(uncaught, "connect_to_agent_store", lambda timeout: store)
    monkeypatch.setattr(uncaught, "WAIT_SECONDS", 0.0)
    for token in ("", "", "first", "second"):
        monkeypatch.setattr(uncaught, "attempt", token)
        for rank in ("0", "1"):
            monkeypatch.setenv("RANK", rank)
            end_with(ConfigError("wrong"))
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hf-zero")]
    assert said == ["hf-zero, rank 0: ConfigError: wrong"] * 4


SCRIPT = """
import os
from hf_zero.distributed import uncaught, world_group
from hf_zero.distributed.init import init_distributed
from hf_zero.errors import ConfigError
uncaught.WAIT_SECONDS = 60.0  # rank 0 may come late
init_distributed("gloo")
with world_group.raise_on_all_ranks("open its files"):
    if os.environ["RANK"] == "0":
        raise ConfigError("the file of rank 0 is not there")
"""


def test_a_mistake_of_rank_0_is_said_by_it_and_the_others_name_it(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    program = [python(), "-c", "from hf_zero.cli import main; main()"]
    command = [*program, "launch", "--num-procs", "2", str(script)]
    own = environment() | {"PYTHON_EXEC": python()}
    own.pop("OMP_NUM_THREADS", None)
    done = completed(command, env=own, timeout=300)
    threads, *lines = LEAKS.sub("", done.stderr).splitlines()
    assert threads.startswith("hf-zero launch: torch uses one CPU thread in each rank")
    assert done.returncode == 1 and len(lines) == 5, lines
    assert lines[0] == "hf-zero, rank 0: ConfigError: the file of rank 0 is not there"
    assert f"at {script}:" in lines[1]
    said = "hf-zero, rank 1: ended because rank 0 has failed; see the error of that rank"
    assert lines[3] == said
    assert lines[4].startswith("hf-zero launch: rank 0 (pid ")
    assert "(ConfigError: the file of rank 0 is not" in lines[4]


def test_a_rank_of_another_host_says_the_reason_itself(monkeypatch) -> None:
    follows = RankMismatchError("rank 0 could not open its files: no such file")
    follows.failed_rank = 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for rank, said in (("1", "ended because rank 0"), ("3", "open its files: no such file")):
        monkeypatch.setenv("RANK", rank), monkeypatch.setenv("LOCAL_RANK", "1")
        assert said in uncaught.described(follows, None)
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        for value in ("", "many"):  # no number says which ranks are here
            monkeypatch.setenv("RANK", "1"), monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
            monkeypatch.setenv(name, value)
            assert "open its files: no such file" in uncaught.described(follows, None)
            monkeypatch.setenv("LOCAL_RANK", "1")


def test_torchrun_reads_the_error_of_the_rank_that_failed_alone(
    seen, monkeypatch, tmp_path
) -> None:
    read = tmp_path / "error.json"
    monkeypatch.setenv("RANK", "1"), monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(read))
    follows = RankMismatchError("rank 0 could not open its files")
    follows.failed_rank = 0
    end_with(follows)
    assert not read.exists()
    end_with(ConfigError("wrong"))
    assert '"ConfigError: wrong"' in read.read_text()


@in_turn(
    "code, given, said",
    [
        (7, 7, "rank 1 (pid 5) ended with code 7; 1 other ended, too"),
        (-9, 137, "rank 1 (pid 5) was ended by SIGKILL (the kernel"),
    ],
)
def test_the_launcher_says_how_a_rank_ended(code, given, said) -> None:
    failures = {
        rank: SimpleNamespace(
            pid=rank + 4, exitcode=code, timestamp=2 - rank, error_file_data={"message": "-"}
        )
        for rank in range(2)
    }
    error = ChildFailedError.__new__(ChildFailedError)
    error.failures = failures
    ended = launcher._exit_of(error)
    assert ended is not None and ended[0] == given and ended[1].startswith(said)
    assert launcher._exit_of(ValueError("the launcher's own")) is None


def test_a_port_that_is_taken_is_said_by_the_launcher() -> None:
    with socket.socket() as held:
        held.bind(("", 0))
        held.listen()
        port = held.getsockname()[1]
        with pytest.raises(DistNetworkError) as refused:
            TCPStore("localhost", port, is_master=True, timeout=timedelta(seconds=60))
    accelerates = ConnectionError(
        f"Tried to launch distributed communication on port `{port}`, but another process is "
        "utilizing it. Please specify a different port"
    )
    for error in (refused.value, accelerates):
        ended = launcher._exit_of(error)
        assert ended is not None and ended[0] == 1
        assert f"port {port}, where the ranks are to meet, is taken" in ended[1]
        assert "leave --master-port out" in ended[1]
