"""The table of DeepSpeed's own tests is that of the figures; what a run has left open goes on."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from scripts.deepspeed_tests import figures, kinds, reasons, runs
from scripts.deepspeed_tests import rows as progress
from tests.helpers.cells import in_one_item

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_is_that_of_the_figures() -> None:
    rows = json.loads(figures.RAW.read_text())
    assert figures.table(rows) == figures.TABLE.read_text()


def test_a_failure_that_stays_says_why() -> None:
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
    assert "| on purpose: reads what DeepSpeed's implementation keeps | 2 | 0 |" in text
    assert "| a feature that is not built | 1 | 0 |" in text
    assert "0 assert that DeepSpeed refuses what works here, and 2 read" in text
    assert "Of the other 1, 0 pass (0%)." in text


def read(folder: Path, events: list[dict[str, str]], **how: bool) -> Any:
    (folder / "events").write_text("".join(json.dumps(event) + "\n" for event in events))
    run = runs.Run(folder, [], True, 60)
    run._read(folder, ["a.py"], None, **{"late": False, "crashed": False} | how)
    return run


def test_what_a_rank_raises_is_written_down_and_reaches_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPSPEED_TESTS_FOLDER", str(tmp_path))
    monkeypatch.setenv("HF_ZERO_AUTOLOAD", "1")
    file = ROOT / "scripts" / "deepspeed_tests_plugin.py"
    spec = importlib.util.spec_from_file_location("plugin", file)
    assert spec is not None and spec.loader is not None
    plugin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)

    @plugin.recorded
    def rank(error: BaseException | None) -> str:
        if error is not None:
            raise error
        return "passed"

    assert rank(None) == "passed"
    with pytest.raises(ValueError, match="wrong"):
        rank(ValueError("wrong"))
    # a BaseException, which ends the process of a pool without a word
    with pytest.raises(AssertionError, match="DID NOT RAISE"):
        rank(pytest.fail.Exception("DID NOT RAISE"))
    with pytest.raises(pytest.skip.Exception):
        rank(pytest.skip.Exception("no"))
    lines = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert [line["raised"] for line in lines] == ["ValueError: wrong", "Failed: DID NOT RAISE"]


def test_what_the_plugin_writes_is_read(tmp_path: Path) -> None:
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
    run = read(tmp_path, events)
    late = "not run: longer than 60 s"
    done = {names[0]: "passed", names[1]: "ValueError: wrong, in full"}
    assert run.said == done | {names[2]: late}
    assert run.missing == names[3:] and run.not_collected == {"b.py": "ImportError: no"}
    run = read(tmp_path, events, late=True)
    assert run.said == done and run.missing == names[2:]
    run = read(tmp_path, events, crashed=True)
    assert run.said[names[2]] == "the process ended within the test"
    run = read(tmp_path, [*events, {"raised": "KeyError: it"}])
    assert run.said[names[2]] == "KeyError: it (on one rank, while another waited)"


class Ran:
    """A run whose tests have ended as ``said`` says."""

    def __init__(self, said: dict[str, str], missing: list[str] | None = None) -> None:
        self.outcomes, self.left = said, missing or []
        self.said: dict[str, str] = {}
        self.missing: list[str] = []
        self.not_collected: dict[str, str] = {}
        self.collected = {*said, *self.left}
        self.asked: list[str] | None = []

    def run(self, files: list[str], wanted: list[str] | None, until: Any) -> None:
        if files:
            self.asked, self.said, self.missing = wanted, self.outcomes, self.left


def test_a_run_goes_on_where_another_was_ended() -> None:
    rows: Any = {"a.py": {"kind": "public", "private": []}}
    begun = Ran({"a.py::1": "passed", "a.py::2": "skipped: x"}, ["a.py::3"])
    progress.over_peer(rows, begun, "v1", 0)
    all_rows = {"ref": "v", "all": dict.fromkeys(kinds.KINDS, 2), "to_run": [], "files": rows}
    first = Ran({"a.py::1": "ValueError: wrong"})
    progress.over_facade(rows, first, "ours", "none", 0)
    assert first.asked == ["a.py::1"]
    assert rows["a.py"]["facade"]["failed"] == {"1": "ValueError: wrong"}
    assert "| public | 0 of 2 | 1 | 1 |" in figures.table(all_rows)
    peer = Ran({"a.py::3": "passed"})
    progress.over_peer(rows, peer, "v1", 0)
    assert peer.asked == ["a.py::3"] and rows["a.py"]["peer"]["passed"] == ["1", "3"]
    assert rows["a.py"]["peer"]["others"] == {"skipped: x": 1}
    second = Ran({"a.py::3": "not run: longer than 60 s"})
    progress.over_facade(rows, second, "ours", "none", 0)
    assert second.asked == ["a.py::3"] and rows["a.py"]["facade"]["not_run"] == ["3"]
    third = Ran({"a.py::1": "passed", "a.py::3": "passed"})
    progress.over_facade(rows, third, "ours", "failed", 0)
    assert third.asked == ["a.py::1", "a.py::3"]
    found = {"of": "ours", "passed": ["1", "3"], "failed": {}, "not_run": []}
    assert rows["a.py"]["facade"] == found
    done = Ran({})
    progress.over_facade(rows, done, "ours", "none", 0)
    assert done.asked == []
    assert "| public | 1 of 2 | 2 | 2 | 2 (100%) | 0 | 0 |" in figures.table(all_rows)


KINDS = [
    ("import deepspeed\nfrom deepspeed.comm import all_reduce", "public"),
    ("from deepspeed.runtime.zero.stage3 import isclose, no_such", "internals"),
    ("from deepspeed.utils import logger\nfrom deepspeed.io import Writer", "mixed"),
    ("import deepspeed\ndeepspeed.comm.all_reduce, deepspeed.runtime.config.Odd", "mixed"),
    ("from deepspeed.runtime.zero import stage3 as three\nthree.Part, three.x", "mixed"),
]


def test_files_are_told_apart_by_what_they_import(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    for source, kind in KINDS:
        file.write_text(source)
        assert kinds.kind_of(file) == kind, source


def test_tests_of_private_attributes_are_known() -> None:
    source = """
def make(engine): return engine._hidden
class TestIt:
    def test_own(self, engine): self._own(engine.public, engine.__dict__)
    def test_deep(self, engine): make(engine)
    def test_named(self, engine): getattr(engine, "_hidden")
    def test_method(self, engine): self._checked(engine)
    def _checked(self, engine): return engine._hidden
class TestOther:
    def test_method(self, engine): self._checked(engine)
    def _checked(self, engine): return engine.public
def test_plain(engine): engine.step()
"""
    found = kinds.private_tests(ast.parse(source))
    assert found == {"TestIt::test_deep", "TestIt::test_named", "TestIt::test_method"}


def test_private_attributes_that_helpers_of_other_files_use_count(tmp_path: Path) -> None:
    unit = tmp_path / "unit"
    (unit / "checkpoint").mkdir(parents=True)
    (unit / "checkpoint" / "common.py").write_text(
        "def load(engine): return engine._hidden\ndef save(engine): engine.save()\n"
    )
    (unit / "test_it.py").write_text(
        """
import deepspeed
from unit.checkpoint.common import *
def test_load(engine): load(engine)
def test_save(engine): save(engine)
def test_made(): Namespace(_config=1)
"""
    )
    found = kinds.about(unit, "test_it.py")
    assert found == {"kind": "public", "private": ["test_load", "test_made"]}


NINJA = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(sleep, process_group=0).pid, flush=True)
"""


@in_one_item([False, True], named="has ended: {}".format)
def test_compilers_in_groups_of_their_own_end_with_the_run_and_no_other_process(
    ended: bool,
) -> None:
    source = NINJA if ended else f"{NINJA}time.sleep(600)"
    command = [sys.executable, "-c", source]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as run,
        subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as other,
    ):
        compilers = [psutil.Process(int(each.stdout.readline())) for each in (run, other)]
        try:
            if ended:
                run.wait(), other.wait()
            runs.end_session(run.pid)
            states = [each.is_running() and each.status() for each in compilers]
            assert states[0] in (False, psutil.STATUS_ZOMBIE)
            assert states[1] not in (False, psutil.STATUS_ZOMBIE)
        finally:
            for each in (*compilers, run, other):
                with suppress(psutil.NoSuchProcess):
                    each.kill()
