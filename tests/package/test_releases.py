"""The page of releases shows the rows of scripts/releases."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def releases(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("releases")


def test_the_page_shows_the_rows(releases: Any) -> None:
    rows = [json.loads(line) for line in releases.ROWS.read_text().splitlines()]
    assert rows and f"<!-- releases -->\n{releases.table(rows)}\n" in releases.PAGE.read_text()
    for paths in releases.SELECTION.values():
        assert all((ROOT / "tests" / path).exists() for path in paths)
