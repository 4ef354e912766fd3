"""Pictures of the README that scripts draw from rows: the terminal session of its two commands, and
measurements beside peers. tests/config/test_schema.py compares the files with what scripts write.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
DRAWINGS = ROOT / "hf_zero" / "docs" / "drawings"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that imports a module of scripts/."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if name == "recording" or name.split(".")[0] == "bench":
            del sys.modules[name]


def texts(svg: Path) -> list[str]:
    return ["".join(node.itertext()) for node in ElementTree.parse(svg).iter(f"{SVG}text")]


def log_of(*lines: str) -> list[dict[str, Any]]:
    return [{"line": line, "seconds": float(second)} for second, line in enumerate(lines)]


def test_a_picture_is_small_and_asks_for_nothing() -> None:
    names = ("quickstart", "measured", "stages")
    for path in (path for name in names for path in DRAWINGS.glob(f"{name}-*.svg")):
        source = path.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert len(source.encode()) < 30_000
        asks = ("http", "url(", "@import", "<script", "<image")
        assert not [word for word in asks if word in source], path
        assert ElementTree.parse(path).getroot().find(f"{SVG}title") is not None, path


def test_each_line_of_the_terminal_is_in_the_log(scripts: Any) -> None:
    recording, scheme = scripts("recording"), "light"
    about, *rows = recording.rows_of(recording.latest())
    tree = ElementTree.parse(DRAWINGS / f"quickstart-{scheme}.svg")
    drawn = [node.findall(f"{SVG}text") for node in tree.iter(f"{SVG}g")]
    shown = [line.text for line, *_ in drawn if line.text != recording.ELLIPSIS]
    logged = iter(row["line"] for row in rows)
    for text in shown:  # in the order of the log
        assert any(text == line or _beginning(text, line) for line in logged), text
    assert 5 < len(drawn) <= recording.ROWS + recording.MORE
    assert max(map(len, shown)) <= recording.COLUMNS
    (caption, *_) = texts(DRAWINGS / f"quickstart-{scheme}.svg")
    parts = [about["date"], about["cpu"], about["versions"]["torch"], about["versions"]["python"]]
    assert [part for part in parts if part not in caption] == []


def _beginning(text: str, line: str) -> bool:
    return text.endswith("…") and len(text) > 50 and line.startswith(text[:-1])


def test_the_middle_of_a_log_is_elided(scripts: Any) -> None:
    recording = scripts("recording")
    steps = [f"12:00:{second:02} step {second}" for second in range(30)]
    shown = recording.lines(log_of("$ run", "", *steps, "== end", "y" * 200))
    assert [line.text for line in shown] == [
        "$ run", "", *steps[:3], "…", *steps[-2:], "== end", "y" * 99 + "…",
    ]  # fmt: skip
    few = recording.lines(log_of(*steps[:6]))
    assert [line.text for line in few] == steps[:6]
    table = ["┌───┐", "│ a │", "└───┘"]  # whole if it is the last
    shown = recording.lines(log_of("$ run", *table, "== end", *table, "done"))
    assert [line.text for line in shown] == ["$ run", "…", "== end", *table, "done"]
    full = log_of(*[f"line {number}" for number in range(26)], *steps)
    assert [line.text for line in recording.lines(full)[26:]] == ["…", steps[-1]]
    with pytest.raises(ValueError, match="40 lines do not fit the 28 of a picture"):
        recording.lines(log_of(*[f"line {number}" for number in range(40)]))


def test_a_recording_keeps_lines_and_times(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = scripts("recording")
    monkeypatch.setattr(
        recording, "COMMANDS", {"two": "printf one\\n\\r0%%\\r99%%\\n", "bad": "false"}
    )
    monkeypatch.setattr(recording, "environment", lambda: {"date": "2026-11-25"})
    about, *rows = json.loads(json.dumps(recording.record(["two"])))
    assert about == {"date": "2026-11-25"}
    assert [row["line"] for row in rows] == ["$ printf one\\n\\r0%%\\r99%%\\n", "one", "99%"]
    assert all(0 <= row["seconds"] < 60 for row in rows)
    with pytest.raises(SystemExit, match="false failed with exit code 1; no picture"):
        recording.record(["bad"])


def test_measurements_show_the_ratios_of_their_rows(scripts: Any) -> None:
    """Figures of FSDP2 with offload, which keeps less memory, and of a converted checkpoint."""
    picture, scheme = scripts("bench.picture"), "light"
    offload = {
        row["contender"]: row["kept_mb"]
        for row in picture.rows_of(picture.OFFLOAD)
        if "contender" in row
    }
    ours, fsdp = offload["all cpu"], offload["fsdp cpu"]
    seconds = [row["seconds"] for row in picture.rows_of(picture.CONVERTING)]
    shown = texts(DRAWINGS / f"measured-{scheme}.svg")
    assert f"{ours:.0f} MiB" in shown
    assert f"{fsdp:.0f} MiB{fsdp / ours:.2f}×" in shown
    assert f"{seconds[0]:.2f} s" in shown
    assert f"{seconds[1]:.2f} s{seconds[1] / seconds[0]:.2f}×" in shown
    tree = ElementTree.parse(DRAWINGS / f"measured-{scheme}.svg")
    spans = [span for span in tree.iter(f"{SVG}tspan") if (span.text or "").endswith("×")]
    for span in spans:
        better = float((span.text or "").rstrip("×")) < 1
        assert (span.get("font-weight") is not None) == better, span.text
    panels = [*picture.STAGES, *(panel for _, pair in picture.groups() for panel in pair)]
    assert len(spans) == sum(len(panel.bars()) - 1 for panel in panels)
