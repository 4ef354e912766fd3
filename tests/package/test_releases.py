"""scripts/releases: its environments, and the table that it makes of the results."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = """<testsuites><testsuite>
<testcase classname="tests.zero.layout.test_wrap" name="test_a"/>
<testcase classname="tests.integrations.trl.test_trainers" name="test_b[x|y]"><failure/></testcase>
<testcase classname="tests.integrations.trl.test_trainers" name="test_c"><skipped/></testcase>
<testcase classname="" name="tests.integrations.lightning.test_strategy"><error/></testcase>
<testcase classname="tests.zero_of_another_name" name="test_d"><failure/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def releases(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("releases")


def test_the_page_shows_the_rows(releases: Any) -> None:
    rows = [json.loads(line) for line in releases.ROWS.read_text().splitlines()]
    assert rows and f"<!-- releases -->\n{releases.table(rows)}\n" in releases.PAGE.read_text()
    for paths in releases.SELECTION.values():
        assert all((ROOT / "tests" / path).exists() for path in paths)


def test_results_are_counted_by_column(releases: Any) -> None:
    columns = releases.columns(RESULTS)
    adapters = {"passed": 0, "failed": ["tests.integrations.trl.test_trainers::test_b[x|y]"]}
    lightning = {"passed": 0, "failed": ["tests.integrations.lightning.test_strategy"]}
    assert columns == {
        "engine": {"passed": 1, "failed": []},
        "TRL": adapters,
        "PEFT": adapters,
        "Lightning": lightning,
    }
    row = {"environment": "torch 2.15.0", "date": "2026-11-26", "broken": [], "columns": columns}
    pinned = {**row, "environment": "pinned", "broken": ["triton"], "columns": {}}
    shown = releases.table([row, pinned]).splitlines()
    assert shown[3].startswith("| pinned | broken | not run |")
    assert shown[4].startswith("| torch 2.15.0 | passed | passed | not run |")
    assert "| 1 of 1 failed | 1 of 1 failed | 1 of 1 failed | not run | 2026" in shown[4]
    assert shown[6:9] == ["| Release | Failed |", "| --- | --- |", "| pinned | `triton` |"]
    assert shown[9].endswith("`tests.integrations.lightning.test_strategy` |")
