"""``hf-zero recipe list`` and ``hf-zero init``: recipes copied as a start of one's own."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from hf_zero.cli import recipes
from hf_zero.config import ZeroConfig
from tests.cli.invoked import ROOT, invoke, refusal
from tests.helpers.cells import in_one_item

SHARED = {path.name for path in (ROOT / "recipes").glob("*.py")}
FOLDERS = sorted(path.parent.name for path in (ROOT / "recipes").glob("*/README.md"))


def test_each_recipe_is_one_line_of_the_list_at_any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    rows = json.loads(invoke("recipe list --json"))
    assert sorted(row["name"] for row in rows) == FOLDERS
    assert all(all(row.values()) for row in rows)
    lines = [line.split() for line in invoke("recipe list").splitlines()]
    assert sorted(line[0] for line in lines if line[0] in FOLDERS) == FOLDERS


def test_a_recipe_is_shown_and_copied(tmp_path: Path) -> None:
    shown = json.loads(invoke("recipe show bert-mlm --json"))
    said = invoke("recipe show bert-mlm")
    assert said.startswith("bert-mlm") and "README.md" in shown["files"]
    assert all(shown[what].replace("`", "") in said for what in ("task", "what", "data", "needs"))
    folder = tmp_path / "mine"
    copied = json.loads(invoke(f"init bert-mlm {folder} --json"))["files"]
    assert copied == shown["files"] == sorted(path.name for path in folder.iterdir())


@in_one_item(FOLDERS)
def test_a_copy_has_all_that_its_scripts_import(name: str) -> None:
    copied = recipes._contents(ROOT / "recipes", name)
    scripts = {file for file in copied if file.endswith(".py")}
    for file in scripts:
        for node in ast.walk(ast.parse(copied[file].read_text())):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.py" in SHARED:
                assert f"{node.module}.py" in copied
    own = {path.name for path in (ROOT / "recipes" / name).glob("*.py")}
    assert scripts - own <= SHARED


@pytest.mark.parametrize("name", ["bert-mlm", "cifar10"])
def test_a_configuration_that_is_copied_has_its_schema_beside_it(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    invoke(f"init {name} {folder}")
    files = [*folder.glob("zero*.json"), *folder.glob("zero*.yaml")]
    assert files
    for path in files:
        text = path.read_text()
        assert "../../" not in text and str(ROOT) not in text
        (schema,) = re.findall(r"\$schema\"?[=:] ?\"?([^\s\",]+)", text)
        assert json.loads((folder / schema).read_text())["$id"] == "urn:hf-zero:configuration"
        assert ZeroConfig.from_file(path, allow_auto=True, foreign=True).stage in range(4)


def test_bad_names_and_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for command, said in (
        (f"init bert-mln {tmp_path}/mine", "unknown recipe 'bert-mln'; did you mean 'bert-mlm'?"),
        ("recipe show vitt", "unknown recipe 'vitt'; did you mean 'vit'?"),
        ("recipe bert-mln", "`hf-zero recipe show bert-mlm` shows that recipe"),
        (f"init bert-mlm {tmp_path}", "exists; name a folder that does not"),
        (f"init bert-mlm {tmp_path}/{'a' * 300}", "cannot be written (File name too long); name a"),
        (f"init bert-mlm {tmp_path}/file/mine", "cannot be written (Not a directory); name a"),
    ):
        assert said in refusal(command), command
    monkeypatch.setattr(recipes, "FOLDERS", (tmp_path,))
    assert "there are no recipes in" in refusal("recipe list")
