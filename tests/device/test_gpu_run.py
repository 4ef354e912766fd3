"""The one command for a GPU: what is measured in the time there is, what becomes of cells that
fail, and the table of goals.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import completed

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The modules of scripts/bench."""
    sys.path.insert(0, str(BENCH))
    try:
        import gpu_cells
        import gpu_goals
        import gpu_run

        yield type("Bench", (), {"cells": gpu_cells, "goals": gpu_goals, "run": gpu_run})
    finally:
        sys.path.remove(str(BENCH))


class FakeMachine:
    """A clock that only cells move, and cells that take what ``takes`` says."""

    def __init__(self, bench: Any, takes: dict[str, float], fails: dict[str, str]):
        self.bench, self.takes, self.fails, self.now = bench, takes, fails, 100.0

    def clock(self) -> float:
        return self.now

    def execute(self, cell: Any, limit: float) -> Iterator[dict[str, Any]]:
        yield {"work": cell.work, "of": cell.of, "step_s": 0.1}
        self.now += min(self.takes[cell.name], limit)
        if cell.name in self.fails:
            raise self.bench.run.CellFailed(self.fails[cell.name])


def test_cells_run_in_order_while_they_fit_and_what_did_not_is_written(
    bench: Any, tmp_path: Path
) -> None:
    def cell(of: str, seconds: int, needs: str = "") -> Any:
        return bench.cells.Cell("w", of, seconds, lambda tiny: iter(()), needs)

    cells = [
        cell("first", 60),
        cell("breaks", 30),
        cell("peer", 10, "liger_kernel"),
        cell("long", 200),
        cell("short", 20),
        cell("last", 31),
    ]
    machine = FakeMachine(
        bench,
        {"w first": 70, "w breaks": 10, "w short": 25},
        {"w breaks": "ended with 1: out of memory"},
    )
    path = tmp_path / "rows.jsonl"
    run = bench.run.Run(path, machine.execute, 100 + 140, lambda package: False, machine.clock)
    run.cells(cells)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == run.rows
    assert [(row["of"], *[key for key in row if key not in ("work", "of")]) for row in rows] == [
        ("first", "step_s"), ("breaks", "step_s"), ("breaks", "failed"), ("peer", "missing"),
        ("long", "skipped"), ("short", "step_s"), ("last", "skipped"),
    ]  # fmt: skip
    assert (
        rows[2]["failed"] == "ended with 1: out of memory"
        and rows[3]["missing"] == "liger_kernel is not installed"
    )
    assert rows[4]["skipped"] == "expected to take 200 s, 55 s are left" and machine.now <= 240


STUB = """
import subprocess, sys, time
print("ROW {\\"work\\": \\"w\\", \\"of\\": \\"a\\", \\"n\\": 1}", flush=True)
print("something else", flush=True)
if sys.argv[1] == "w breaks":
    print("Traceback", "RuntimeError: no memory", sep="\\n", file=sys.stderr)
    sys.exit(3)
if sys.argv[1] == "w hangs":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("ROW {\\"child\\": %d}" % child.pid, flush=True)
    child.wait()
"""


def gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_process_that_fails_or_hangs_keeps_its_rows_and_leaves_nothing_behind(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "stub.py"
    script.write_text(STUB)
    limits: list[threading.Timer] = []

    class Timer(threading.Timer):
        """Its time is over when the row is there that is the last one before it."""

        def start(self) -> None:
            limits.append(self)

    monkeypatch.setattr(bench.run.threading, "Timer", Timer)
    execute = bench.run.in_a_process(False, None, script)

    def told(of: str, limit: float = 30.0) -> tuple[list[dict[str, Any]], str]:
        rows = []
        try:
            for row in execute(bench.cells.Cell("w", of, 1, lambda tiny: iter(())), limit):
                rows.append(row)
                if "child" in row:
                    limits[-1].function()
        except bench.run.CellFailed as failure:
            return rows, str(failure)
        return rows, ""

    one = {"work": "w", "of": "a", "n": 1}
    assert told("ends") == ([one], "")
    assert told("breaks") == ([one], "ended with 3: RuntimeError: no memory")
    rows, failure = told("hangs", limit=3.0)
    assert rows[0] == one and failure == "no end within 3 s"
    for _ in range(1200):
        if gone(rows[1]["child"]):
            break
        time.sleep(0.05)
    assert gone(rows[1]["child"])


def test_the_table_says_of_each_goal_whether_it_is_met(bench: Any) -> None:
    goal = bench.goals.Goal
    rows = [
        {"minutes": 9},
        {"work": "w", "of": "ours", "step_s": 0.2, "gib": 50.0, "faster": 6.5},
        {"work": "w", "of": "slow", "step_s": 0.4},
        {"work": "w", "of": "fast", "step_s": 0.25},
        {"work": "w", "of": "other", "step_s": 0.25},
        {"work": "w", "of": "broken", "failed": "ended with 1"},
        {"work": "w", "of": "none", "missing": "liger_kernel is not installed"},
    ]
    goals = [
        goal("w", "step", "step_s", "ours", 0.21, ("slow", "fast", "none", "broken")),
        goal("w", "memory", "gib", "ours", 41.0, ("slow",)),
        goal("w", "faster", "faster", "ours", 6.0, least=True),
        goal("w", "over", "step_s", "other", 1.05, over="ours"),
        goal("w", "runs", "step_s", "ours", bench.goals.RUNS),
        goal("w", "alone", "step_s", "ours", None),
        goal("w", "absent", "step_s", "broken", 0.1, ("fast",)),
    ]
    drawn, _, below = bench.goals.table(rows, goals).partition("\n\n")
    assert below.splitlines() == [
        "failed: w broken: ended with 1",
        "missing: w none: liger_kernel is not installed",
    ]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in drawn.splitlines()]
    assert lines[0] == ["work", "peer", "hf-zero", "ratio", "goal", "met"]
    assert lines[2:] == [
        ["step", "fast 0.25", "0.2", "0.800", "≤ 0.21", "yes"],
        ["memory", "–", "50", "–", "≤ 41", "no"],
        ["faster", "–", "6.5", "–", "≥ 6", "yes"],
        ["over", "ours 0.2", "0.25", "1.250", "≤ 1.05", "no"],
        ["runs", "–", "0.2", "–", "runs", "yes"],
        ["alone", "–", "0.2", "–", "–", "–"],
        ["absent", "fast 0.25", "–", "–", "≤ 0.1", "not measured"],
    ]


def test_every_goal_is_about_cells_that_are_measured(bench: Any) -> None:
    cells = {(cell.work, cell.of) for cell in bench.cells.CELLS}
    assert len(cells) == len(bench.cells.CELLS)
    for goal in bench.goals.GOALS:
        assert (goal.work, "") in cells or {
            (goal.work, of) for of in (goal.ours, goal.over, *goal.peers) if of
        } <= cells, goal
    first = [cell.name for cell in bench.cells.CELLS[:6]]
    assert (
        sum(cell.seconds for cell in bench.cells.CELLS[:6]) < 6 * 60
        and "bert-large,256,128 hfz1+all" in first
    )


def test_a_tiny_run_from_the_command_to_the_table(tmp_path: Path) -> None:
    root = BENCH.parents[1]
    env = {**os.environ, "PYTHONPATH": str(root)}
    command = [
        sys.executable,
        str(BENCH / "gpu_run.py"),
        "--tiny",
        "--minutes",
        "10",
        "--only",
        "pinning",
        "--out",
        str(tmp_path),
    ]
    said = completed(command, env=env, timeout=300)
    assert said.returncode == 0, said.stderr
    (path,) = tmp_path.glob("gpu-*-tiny.jsonl")
    head, ours, torchs = (json.loads(line) for line in path.read_text().splitlines())
    assert head["minutes"] == 10 and ours["of"] == "hf-zero" and torchs["of"] == "torch pin_memory"
    assert ours["device"] == "cpu, tiny" and ours["torch"] and 0.5 < ours["over_asked"] < 2
    assert (
        "| pinning 8 GiB, s " in said.stdout
        and "not measured" in said.stdout
        and "mean nothing" in said.stdout
    )
    table = said.stdout[said.stdout.index("| work") :]
    again = completed([*command[:2], "--table", str(path)], env=env, timeout=300)
    assert again.stdout == table
