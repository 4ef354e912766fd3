"""``hf-zero top``: figures of a run that is written, in the terminal."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_zero.cli import runs as command
from hf_zero.cli.printing import PrintableTable, print_json, print_table
from hf_zero.errors import ConfigError
from hf_zero.logging import BARS, curve, parse_json
from hf_zero.measures import metrics_file
from hf_zero.measures.run_record import BUFFERS
from hf_zero.report.run import RunReader
from tests.cli.invoked import invoke, refusal


@pytest.fixture
def run(tmp_path: Path) -> Path:
    header = {
        "started": "2026-11-27T05:21:19+00:00", "model": "Tiny", "stage": 3, "precision": "bf16",
        "ranks": 2, "program": "train.py", "versions": {}, "mesh": {}, "parameters": 8,
        "hosts": [{"host": "a", "device": "CPU", "ranks": [0, 1]}], "predicted": [
            {"tier": "device", "kind": "parameters", "what": "shards", "bytes": 1 << 20},
            {"tier": "device", "kind": BUFFERS, "what": "gathers", "bytes": 1 << 30},
        ],
    }  # fmt: skip
    rows: list[dict[str, Any]] = [{"run": header, "after_step": 0, "repeated_steps": 0, "time": 1}]
    for step in range(1, 31):
        rows.append(
            {
                "step": step, "loss": 4 - step / 10, "grad_norm": 1.0, "learning_rate": 1e-3,
                "step_ms": 200.0 if step > 1 else 9000.0, "tokens_per_second": 50.0,
                "gather_wait_ms": 15.0, "reduction_wait_ms": 5.0, "mfu": 0.25,
                "device_bytes": 2 << 20, "ram_bytes": 0, "disk_bytes": 0,
            }
        )  # fmt: skip
    text = "\n".join(map(json.dumps, rows))
    (tmp_path / "metrics.jsonl").write_text(text + '\n{"step": 31, "lo')  # being written
    return tmp_path


def test_names_and_figures_of_a_report_control_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = PrintableTable("", "r\x1b[31mun", title="\x1b[2Jt", caption="c")
    table.add_column("\x1b[0mh", "\x1b[1mf")
    table.add_row("a", "b", "\x07")
    for _ in range(2):  # printing changes no table
        print_table(table)
        shown = capsys.readouterr().out
        assert "\x1b" not in shown and "\x07" not in shown
        assert all(text in shown for text in ("r\\x1b[31mun", "\\x1b[2Jt", "\\x1b[0mh", "c"))


def test_json_of_commands_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"loss": float("nan"), "rates": [float("inf"), 1.0], Path("a"): Path("b")})
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert printed == {"loss": None, "rates": [None, 1.0], "a": "b"}


def test_the_figures_of_a_run(run: Path) -> None:
    found = json.loads(invoke(f"top {run} --steps 80 --json"))
    assert (found["step"], found["loss"], found["step_ms"]) == (30, 1.0, 200.0)
    assert found["exposed_communication"] == pytest.approx(0.1) and found["mfu"] == 0.25
    assert found["memory"] == {"device": {"bytes": 2 << 20, "predicted": 1 << 20}}
    assert found["seconds_left"] == pytest.approx(50 * 0.2)
    assert json.loads(invoke(f"top {run} --json"))["seconds_left"] is None
    shown = invoke(f"top {run} --steps 80")
    for text in (
        "step 30 of 80, Tiny, stage 3, bf16, 2 ranks", "exposed communication", "10.0%", "25.0%",
        "2.10 MB", "1.05 MB predicted", "0:00:10", BARS,
    ):  # fmt: skip
        assert text in shown if text != BARS else BARS[0] in shown, text


def test_the_states_of_ranks_while_rank_0_waits(run: Path) -> None:
    """Until the next step, in which all take part."""
    file = run / "metrics.jsonl"
    whole = file.read_text().partition('{"step": 31')[0]
    groups = [
        {"ranks": [0, 1, 2, 5], "state": "waits", "what": "all-gather of layers.1"},
        {"ranks": [3], "state": "dead", "what": ""},
    ]
    states = json.dumps({"ranks": groups, "after_step": 30, "time": 1.7e9})
    file.write_text(whole + states + "\n")
    os.utime(file, (1.7e9, 1.7e9))
    found = json.loads(invoke(f"top {run} --json"))
    assert found["ranks"] == groups and found["seconds_since_update"] > 1e7
    shown = invoke(f"top {run}")
    for text in ("ranks 0-2, 5", "waits: all-gather of layers.1", "since 2023-11-14 22:13:20 UTC"):
        assert text in shown, shown
    assert "rank 3" in shown and "dead" in shown
    file.write_text(whole + states + '\n{"step": 31, "loss": 0.5}\n')
    assert json.loads(invoke(f"top {run} --json"))["ranks"] == []
    file.write_text(whole + states.replace("dead", "asleep") + "\n")
    assert "ranks[1].state is 'asleep', expected one of" in refusal(f"top {run}")


def test_the_end_of_a_run(run: Path) -> None:
    """Until it resumes: neither the time that is left nor a refreshed table."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines()[:-1]
    end = {"ended": "", "after_step": 30, "time": 1}
    lines.append(json.dumps({"warning": "a full disk", "after_step": 30, "time": 1}))
    for ended in ("", "ValueError: no more batches"):
        file.write_text("\n".join([*lines, json.dumps(end | {"ended": ended})]))
        found = json.loads(invoke(f"top {run} --steps 80 --json"))
        assert (found["ended"], found["seconds_left"]) == (ended, None)
        shown = invoke(f"top {run} --steps 80")
        assert "step 30 of 80, ended, Tiny" in shown and "left" not in shown
        assert "0 restarts, 1 warning " in shown
        assert ("ended by" in shown and ended in shown) is bool(ended)
    file.write_text("\n".join([*lines, json.dumps(end), lines[0]]))
    assert json.loads(invoke(f"top {run} --json"))["ended"] is None
    file.write_text(json.dumps(end | {"ended": 1}) + "\n")
    assert "after step 30 is damaged: ended is 1, expected text" in refusal(f"top {run}")


def test_lines_are_parsed_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look parses the lines since the last one, behind a rotation too; a file that has become
    shorter, or another one, is read from its beginning.
    """
    parsed: list[str] = []
    monkeypatch.setattr(
        metrics_file, "parse_json", lambda line: parsed.append(line) or parse_json(line)
    )
    file, reader = run / "metrics.jsonl", RunReader(run)

    def look(lines: int, steps: int, last: int) -> None:
        parsed.clear()
        found = reader.read()
        assert (len(parsed), len(found.steps), found.steps[-1]["step"]) == (lines, steps, last)

    look(lines=32, steps=30, last=30)
    look(lines=1, steps=30, last=30)  # the line that is being written
    with file.open("a") as opened:
        opened.write('ss": 1}\n{"step": 32}\n')
    look(lines=2, steps=32, last=32)
    file.rename(run / "metrics.1.jsonl")
    look(lines=0, steps=32, last=32)
    file.write_text('{"step": 33}\n{"step": 34}\n')
    look(lines=2, steps=34, last=34)
    os.truncate(file, file.stat().st_size // 2)
    look(lines=1, steps=33, last=33)
    file.write_text('{"step": 41}\n{"step": 42}\n{"step": 43}\n')  # another, in the same inode
    look(lines=3, steps=35, last=43)
    (run / "metrics.draft").write_text('{"step": 1}\n')
    (run / "metrics.draft").replace(file)
    look(lines=1, steps=33, last=1)
    file.unlink()
    look(lines=0, steps=32, last=32)
    file.write_text('{"step": 33, "loss": "low"}\n')
    with pytest.raises(ConfigError, match="of step 33 is damaged"):
        reader.read()
    listed = metrics_file.files_of
    monkeypatch.setattr(metrics_file, "files_of", lambda at: [*listed(at), at / "renamed"])
    file.unlink()
    look(lines=0, steps=32, last=32)  # a file that was renamed behind the listing


def test_curves_and_folders_without_a_run(tmp_path: Path) -> None:
    assert curve([0.0, 1.0, 2.0, 7.0]) == "▁▂▃█"
    assert curve([1.0] * 100, width=5) == "▁" * 5 and curve([float("nan")]) == ""
    assert "has no metrics.jsonl" in refusal(f"top {tmp_path}")


def test_a_running_run_is_read_until_it_has_ended(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Live:
        """The titles of the tables that are shown."""

        def __init__(self, table: Any, **options: Any) -> None:
            shown.append(table.title)

        def __enter__(self) -> Live:
            return self

        def __exit__(self, *ended: Any) -> None: ...

        def update(self, table: Any) -> None:
            shown.append(table.title)

    def sleep(seconds: float) -> None:
        with (run / "metrics.jsonl").open("a") as file:
            file.write('ss": 1}\n{"step": 32, "loss": 0.5}\n{"ended": "", "after_step": 32}\n')

    shown: list[str] = []
    monkeypatch.setattr("rich.live.Live", Live)
    monkeypatch.setattr(command.time, "sleep", sleep)
    monkeypatch.setattr(
        command, "sys", SimpleNamespace(stdout=SimpleNamespace(isatty=lambda: True))
    )
    command.top(str(run))
    assert "step 30," in shown[0] and "step 32, ended," in shown[1]
