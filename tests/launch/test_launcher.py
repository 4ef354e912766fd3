"""Failures of ranks as ``hf-zero launch`` repeats them, and its exit codes."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from hf_zero.distributed.torchrun import start_ranks_whole
from hf_zero.launch import launcher
from tests.helpers.cells import in_one_item

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
    assert launcher._first(failures) == (first, failures[first], repeated)


def test_a_signal_keeps_its_exit_code_with_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(*_: Any, **__: Any) -> None:
        assert "SIGUSR1" in os.environ[launcher.HANDLED], "it would end torchrun, not its ranks"
        raise api.SignalException("got signal: 15", sigval=signal.SIGTERM)

    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(launcher.runpy, "run_module", ends)
    monkeypatch.setattr(dist, "TCPStore", dist.TCPStore)  # which main replaces in its process
    for shown in ("0", "1"):
        monkeypatch.setattr(sys, "argv", ["launcher.py", "torch.distributed.run"])
        monkeypatch.setenv("HF_ZERO_TRACEBACK", shown)
        assert launcher.main() == 128 + signal.SIGTERM
        said = capsys.readouterr().err
        assert said.endswith("hf-zero launch: this launcher was ended by SIGTERM\n")
        assert ("Traceback" in said) is (shown == "1")


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
