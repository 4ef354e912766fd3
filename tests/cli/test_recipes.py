"""``hf-zero recipe list`` and ``hf-zero init``: recipes copied as a start of one's own."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_zero.cli import recipes
from hf_zero.cli.app import app
from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError
from tests.helpers.cells import in_one_item

ROOT = Path(__file__).resolve().parents[2]
SHARED = {path.name for path in (ROOT / "recipes").glob("*.py")}
FOLDERS = sorted(path.parent.name for path in (ROOT / "recipes").glob("*/README.md"))


def invoke(*arguments: str) -> Any:
    done = CliRunner().invoke(app, list(arguments))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def test_each_recipe_is_listed() -> None:
    rows = json.loads(invoke("recipe", "list", "--json"))
    assert sorted(row["name"] for row in rows) == FOLDERS
    assert all(all(row.values()) for row in rows)
    assert all(name in invoke("recipe", "list") for name in FOLDERS)


def test_a_recipe_is_one_line_of_the_list_at_any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = [line.split() for line in invoke("recipe", "list").splitlines()]
    assert sorted(line[0] for line in lines if line[0] in FOLDERS) == FOLDERS


@in_one_item(FOLDERS)
def test_a_recipe_is_shown(name: str) -> None:
    shown = json.loads(invoke("recipe", "show", name, "--json"))
    said = invoke("recipe", "show", name)
    assert said.startswith(name) and "README.md" in shown["files"]
    assert all(shown[what].replace("`", "") in said for what in ("task", "what", "data", "needs"))


def test_a_copy_has_all_that_its_scripts_import(tmp_path: Path) -> None:
    for name in FOLDERS:
        check_copy(name, tmp_path / name)


def check_copy(name: str, folder: Path) -> None:
    said = json.loads(invoke("init", name, str(folder), "--json"))
    assert said["files"] == sorted(path.name for path in folder.iterdir())
    assert json.loads(invoke("recipe", "show", name, "--json"))["files"] == said["files"]
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.py" in SHARED:
                assert (folder / f"{node.module}.py").is_file()
    own = {path.name for path in (ROOT / "recipes" / name).glob("*.py")}
    assert {path.name for path in folder.glob("*.py")} - own <= SHARED
    for path in [*folder.glob("zero*.json"), *folder.glob("zero*.yaml")]:
        text = path.read_text()
        assert "../../" not in text and str(ROOT) not in text
        (schema,) = re.findall(r"\$schema\"?[=:] ?\"?([^\s\",]+)", text)
        assert json.loads((folder / schema).read_text())["$id"] == "urn:hf-zero:configuration"
        assert ZeroConfig.from_file(path, allow_auto=True, foreign=True).stage in range(4)


def test_bad_names_and_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"unknown recipe 'bert-mln'; did you mean 'bert-mlm'\?"):
        invoke("init", "bert-mln", str(tmp_path / "mine"))
    with pytest.raises(ConfigError, match=r"unknown recipe 'vitt'; did you mean 'vit'\?"):
        invoke("recipe", "show", "vitt")
    for name in ("bert-mlm", "bert-mln"):
        with pytest.raises(ConfigError, match="`hf-zero recipe show bert-mlm` shows that recipe"):
            invoke("recipe", name)
    with pytest.raises(ConfigError, match="exists; name a folder that does not"):
        invoke("init", "bert-mlm", str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file.* cannot be written \(Not a directory\); name a"):
        invoke("init", "bert-mlm", str(tmp_path / "file" / "mine"))
    monkeypatch.setattr(recipes, "FOLDERS", (tmp_path,))
    with pytest.raises(ConfigError, match="there are no recipes in"):
        invoke("recipe", "list")
