"""Imports from the package in programs beside it exist: a renaming that misses one of them fails
here, and not at its next run.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tests/late", "tests/gpu", "scripts")


def imported(source: str) -> Iterator[tuple[str, str]]:
    """(module, name) of each import from hf_zero; the name is empty where the module is meant."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hf_zero":
            yield from ((node.module or "", alias.name) for alias in node.names)
        if isinstance(node, ast.Import):
            yield from (
                (alias.name, "") for alias in node.names if alias.name.split(".")[0] == "hf_zero"
            )


def missing(source: str) -> list[str]:
    found = []
    for module, name in imported(source):
        try:
            there = importlib.import_module(module)
            if name and not hasattr(there, name):
                importlib.import_module(f"{module}.{name}")
        except ModuleNotFoundError as error:
            found.append(f"{module} {name}: {error}")
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_from_the_package_are_there(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert [f"{file}: {each}" for file in files for each in missing(file.read_text())] == []


def test_what_is_gone_is_seen() -> None:
    assert len(missing("from hf_zero.zero import nowhere\nimport hf_zero.nothing")) == 2
    assert (
        missing("from hf_zero.zero.layout.box import Box\nfrom hf_zero.zero.gather import hooks")
        == []
    )
