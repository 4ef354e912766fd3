"""The table of DeepSpeed's own tests is that of the figures; what a run has left open goes on."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from scripts.deepspeed_tests import figures, reasons, runs

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_is_that_of_the_figures_and_says_why_a_failure_stays() -> None:
    rows = json.loads(figures.RAW.read_text())
    assert figures.table(rows) == figures.TABLE.read_text()
    file = "ops/adam/test_zf_torch_adam.py"
    failed = {"TestIt::test": "NotBuiltError: no", "TestIt::test_other": "NotBuiltError: no"}
    peer = {"of": "deepspeed 0", "passed": list(failed)}
    facade = {"failed": failed, "not_run": []}
    row = {"kind": "public", "private": [], "peer": peer, "facade": facade}
    rows = {"ref": "0", "all": {"public": 1, "mixed": 0, "internals": 0}, "to_run": []}
    other = row | {"peer": peer | {"passed": ["TestIt::test"]}}
    text = figures.table(rows | {"files": {file: row, "b.py": other}})
    why = reasons.ON_PURPOSE[file]
    assert f"| {file} | public | 2 of 2 | on purpose: {why} |" in text
    assert "| b.py | public | 1 of 1 | NotBuiltError: no |" in text
    assert "| public | 2 of 1 | 3 | 3 | 0 (0%) | 3 | 2 | 3 |" in text


def test_what_the_plugin_writes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank raises, also what ends the process of a pool without a word, reaches the pool."""
    monkeypatch.setenv("DEEPSPEED_TESTS_FOLDER", str(tmp_path))
    monkeypatch.setenv("HF_ZERO_AUTOLOAD", "1")
    plugin = runpy.run_path(str(ROOT / "scripts" / "deepspeed_tests_plugin.py"))

    @plugin["recorded"]
    def rank(error: BaseException | None) -> str:
        if error is not None:
            raise error
        return "passed"

    assert rank(None) == "passed"
    with pytest.raises(ValueError, match="wrong"):
        rank(ValueError("wrong"))
    with pytest.raises(AssertionError, match="DID NOT RAISE"):
        rank(pytest.fail.Exception("DID NOT RAISE"))
    with pytest.raises(pytest.skip.Exception):
        rank(pytest.skip.Exception("no"))
    lines = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert [line["raised"] for line in lines] == ["ValueError: wrong", "Failed: DID NOT RAISE"]

    def read(events: list[Any], **how: bool) -> Any:
        (tmp_path / "events").write_text("".join(json.dumps(event) + "\n" for event in events))
        run = runs.Run(tmp_path, [], True, 60)
        run._read(tmp_path, ["a.py"], None, **{"late": False, "crashed": False} | how)
        return run

    names = ["a.py::test_1", "a.py::test_2", "a.py::test_3", "a.py::test_4"]
    events: list[Any] = [
        {"collected": names},
        {"not_collected": "b.py", "said": "ImportError: no"},
        {"starts": names[0]},
        {"ends": names[0], "said": "passed"},
        {"starts": names[1]},
        {"raised": "ValueError: wrong"},
        {"ends": names[1], "said": "ValueError: wrong, in full"},
        {"ends": names[1], "said": "passed"},
        {"starts": names[2]},
    ]
    run = read(events)
    done = {names[0]: "passed", names[1]: "ValueError: wrong, in full"}
    assert run.said == done | {names[2]: "not run: longer than 60 s"}
    assert run.missing == names[3:] and run.not_collected == {"b.py": "ImportError: no"}
    run = read(events, late=True)
    assert run.said == done and run.missing == names[2:]
    said = read(events, crashed=True).said
    assert said[names[2]] == "the process ended within the test"
    said = read([*events, {"raised": "KeyError: it"}]).said
    assert said[names[2]] == "KeyError: it (on one rank, while another waited)"


NINJA = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(sleep, process_group=0).pid, flush=True)
"""


def test_compilers_in_groups_of_their_own_end_with_the_run_and_no_other_process() -> None:
    """Though the run itself has ended."""
    command = [sys.executable, "-S", "-c", NINJA]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as run,
        subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as other,
    ):
        compilers = [psutil.Process(int(each.stdout.readline())) for each in (run, other)]
        try:
            run.wait(), other.wait()
            runs.end_session(run.pid)
            states = [each.is_running() and each.status() for each in compilers]
            assert states[0] in (False, psutil.STATUS_ZOMBIE)
            assert states[1] not in (False, psutil.STATUS_ZOMBIE)
        finally:
            for each in (*compilers, run, other):
                with suppress(psutil.NoSuchProcess):
                    each.kill()
