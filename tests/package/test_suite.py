"""Options of ``scripts/test``, the tests and cells it chooses, and what a run leaves behind."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from scripts import suite
from tests.helpers.cells import by_stage, in_one_item, off_turn, parted

ROOT = Path(suite.__file__).parent.parent


def test_an_impossible_option_is_one_line(capsys):
    for arguments, named in (
        (["--part", "5/4"], "5/4"),
        (["--part", "0/4"], "0/4"),
        (["--part"], "K/N"),
        (["--changed", "no-such-commit"], "no-such-commit"),
    ):
        with pytest.raises(SystemExit) as ended:
            suite.parse(arguments)
        message = capsys.readouterr().err
        assert ended.value.code == 2 and named in message and message.count("\n") == 1


def test_parts_are_whole_files_and_together_all():
    parts = 7
    items = [SimpleNamespace(path=Path(f"test_{at % 11}.py"), name=at) for at in range(200)]
    launches = lambda path: path.name == "test_3.py"  # noqa: E731
    chosen = [parted(items, part, parts, launches) for part in range(1, parts + 1)]
    files = [{item.path for item in each} for each in chosen]
    assert sorted(item.name for each in chosen for item in each) == list(range(200))
    assert sum(map(len, files)) == 11 and all(files)


def test_a_change_touches_tests():
    for changed, touched in (
        ("hf_zero/distributed/attempts.py", "tests/distributed"),
        ("hf_zero/distributed/attempts.py", "tests/distributed/test_attempts.py"),
        ("hf_zero/zero/layout/wrap.py", "tests/ranks"),
        ("tests/helpers/cells.py", "tests/package/test_suite.py"),
        ("scripts/suite.py", "tests/package/test_suite.py"),
        ("README.md", "tests/docs"),
        ("constraints.txt", "tests/package"),
        ("tests/mistakes/scripts.txt", "tests/mistakes"),
        ("tests/package/pins.json", "tests/package"),
        ("tests/late/csrc/clocks.h", "tests/late"),
        ("tests/conftest.py", "tests"),
    ):
        assert touched in suite.tests_of([changed]), changed
    touched = suite.tests_of(["hf_zero/distributed/attempts.py", "scripts/suite.py"])
    assert not any(name.startswith(("tests/kernels", "tests/optim")) for name in touched)


def test_lint_runs_where_a_change_touches_no_test(monkeypatch, capsys):
    commands = []
    monkeypatch.setattr(suite, "changed_files", lambda base: [])
    monkeypatch.setattr(suite, "guarded", lambda: nullcontext({}))

    class Recorded:
        def handle_signals(self) -> None: ...

        def __call__(self, *command: str, **more: str) -> int:
            commands.append(command[1])
            return 0

    monkeypatch.setattr(suite, "Run", lambda environment: Recorded())
    assert suite.run(suite.Options(changed=True)) == 0
    assert commands == ["ruff", "ruff", "mypy"]
    assert "no test is touched" in capsys.readouterr().out


def test_help_makes_no_environment(tmp_path):
    own = {"HF_ZERO_VENV": str(tmp_path / "none"), "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "test"), "-k", "layout", "--help"],
        env={**os.environ, **own, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{suite.HELP}\n" and not done.stderr
    assert not (tmp_path / "none").exists()


RUN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
sys.path.insert(0, {root!r})
from scripts import suite
with suite.guarded() as environment:
    run = suite.Run(environment)
    run.handle_signals()
    open(environment["TMPDIR"] + "/file", "w").close()
    child = "import os, subprocess, sys, time; print(os.environ['TMPDIR'], flush=True);"
    child += "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
    child += "start_new_session=True); print('begun', flush=True); time.sleep(600)"
    sys.exit(run("-c", child))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_nothing(number, tmp_path):
    """Neither processes, also those of a session of their own, nor files."""
    environment = {name: value for name, value in os.environ.items() if name != suite.TOKEN}
    process = subprocess.Popen(
        [sys.executable, "-c", RUN.format(root=str(ROOT))],
        stdout=subprocess.PIPE,
        text=True,
        env={**environment, "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    assert process.stdout.readline() == "begun\n" and (folder / "file").exists()
    process.send_signal(number)
    assert process.wait(60) == (128 + number if number == signal.SIGINT else -number)
    process.stdout.close()
    while folder.exists() or _alive(str(tmp_path)):  # a guard ends and removes them
        time.sleep(0.05)


def _alive(folder: str) -> list[psutil.Process]:
    processes = psutil.process_iter(["environ"])
    return [each for each in processes if folder in (each.info["environ"] or {}).get("TMPDIR", "")]


MARKS = [pytest.mark.parametrize("stage", range(4)), pytest.mark.parametrize("way, size", [])]
WAYS = [("a", 1), ("a", 2), ("b", 1), ("b", 2), ("c", 1)]


class Cell(SimpleNamespace):
    """The part of a ``pytest.Item`` that the selection reads."""

    def __init__(self, *, marked: bool = True, **params: Any) -> None:
        super().__init__(nodeid=f"f::t[{params}]", callspec=SimpleNamespace(params=params))
        self.marked = marked

    __hash__ = object.__hash__

    def get_closest_marker(self, name: str) -> bool:
        return self.marked and name == "turns"

    def iter_markers(self, name: str) -> list[Any]:
        asked = [mark.mark for mark in MARKS if name == "parametrize"]
        return [mark for mark in asked if mark.args[0].partition(",")[0] in self.callspec.params]


def test_values_take_turns_at_stage_3_and_each_other_stage_is_met_once() -> None:
    cells: list[Any] = [
        Cell(stage=stage, way=way, size=size, core=core)
        for stage, (way, size), core in itertools.product(range(4), WAYS, ("x", "y"))
    ]
    late = off_turn(cells)
    ran = {tuple(cell.callspec.params.values()) for cell in cells if cell not in late}
    others = {(0, "a", 1, "x"), (1, "a", 2, "y"), (2, "b", 1, "x")}
    assert ran == others | {(3, *way, core) for way, core in zip(WAYS, "xyxyx")}


def test_all_cells_of_stage_3_are_fast_and_one_of_each_other_stage() -> None:
    ways = ({}, {"device": "cpu"})
    fast, long = by_stage((0, 1, 3), (1, 2), ways)
    others = [(0, 1, ways[0]), (1, 2, ways[1])]
    assert fast == others + [(3, *cell) for cell in itertools.product((1, 2), ways)]
    assert len(long) == 6 and not any(cell in fast for cell in long)


def test_a_cell_that_skips_hides_no_other() -> None:
    ran: list[str] = []

    def over(*cells: str) -> Any:
        def run(cell: str) -> None:
            ran.append(cell)
            if cell.startswith("skips"):
                pytest.skip("not here")
            assert cell == "passes"

        return in_one_item(cells)(run)

    with pytest.raises(AssertionError, match="'fails'"):
        over("fails", "skips", "passes")()
    over("skips", "passes")()
    with pytest.raises(pytest.skip.Exception, match="'skips': not here; 'skips too': not here"):
        over("skips", "skips too")()
    assert ran == ["fails", "skips", "passes", "skips", "passes", "skips", "skips too"]
