"""The page of releases shows the rows of scripts/releases; what it says of runs that do not end."""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

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


def test_an_interrupted_run_has_not_passed(
    releases: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its row says so, and the exit code is 1."""
    columns = {"engine": {"passed": 3, "failed": []}, "kernels": {"passed": 0, "failed": []}}
    row = {"environment": "pinned", "date": "2026-01-01", "versions": {}, "broken": []}
    row |= {"seconds": 1500, "columns": columns}
    monkeypatch.setattr(releases, "ROWS", tmp_path / "rows.jsonl")
    monkeypatch.setattr(releases, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(releases, "environments", lambda *_: {"pinned": {}})
    monkeypatch.setattr(sys, "argv", ["releases", "--cache", str(tmp_path / "cache")])
    for code, cell, ended in ((0, "passed", 0), (124, "not finished", 1), (3, "not finished", 1)):
        releases.ROWS.write_text("")
        releases.PAGE.write_text("<!-- releases -->\n<!-- end of releases -->\n")
        monkeypatch.setattr(releases, "run", lambda *_: row | {"exit_code": code})  # noqa: B023
        assert releases.main() == ended
        assert f"| pinned | passed | {cell} | not run |" in releases.PAGE.read_text()
        assert ("exit code" in capsys.readouterr().out) == bool(code)


def test_what_frameworks_require_has_releases_in_common_with_the_metadata(releases: Any) -> None:
    """By what pip has read of them: a floor that rises above one of them fails here."""
    rows = {
        row["environment"]: row for row in map(json.loads, releases.ROWS.read_text().splitlines())
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = sum(project["optional-dependencies"].values(), project["dependencies"])
    ours: dict[str, SpecifierSet] = {each.name: each.specifier for each in map(Requirement, lines)}
    required = 0
    for name, asked in releases.FRAMEWORKS.items():
        row = rows[name]
        assert row["asked"] == asked, f"scripts/releases --only frameworks={name} --resolve"
        for library, version in row["resolved"].items():
            theirs = SpecifierSet(row["requires"].get(library, ""))
            where = f"{name} requires {library} {theirs}, and hf-zero {ours[library]}"
            assert version in theirs and version in ours[library], where
            required += bool(theirs)
    assert required > 15


def test_releases_that_no_index_has_named_are_one_line(
    releases: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*words: str) -> str:
        raise RuntimeError("WARNING: retrying\nERROR: no network")

    monkeypatch.setattr(releases, "pip", offline)
    with pytest.raises(SystemExit, match=r"releases of torch yet \(ERROR: no network\); run once"):
        releases.published("torch", tmp_path, [])
    (tmp_path / "torch.txt").write_text("2.13.0, 2.11.0, 1.0.0")
    assert releases.published("torch", tmp_path, []) == ["2.13.0", "2.11.0"]
