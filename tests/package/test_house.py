"""Widths of the package's classes, read from the source, and that the measures see what they
count.
"""

from __future__ import annotations

import ast
import importlib.util
from collections import Counter
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers import house
from tests.package.test_layering import PACKAGE, ROOT

# one for each of Lightning's packages; the core's queue of transfers, and its copy in Python
NAMES_TAKEN_TWICE = {"FileQueue", "ZeroPrecision", "ZeroStrategy"}
SOURCES = house.sources(PACKAGE)


@cache
def widths() -> list[house.ClassWidth]:
    return house.class_widths(SOURCES)


RELATIVE = {"as", "how", "of", "those", "what", "where", "which", "whose"}
MOST_RELATIVE = 0.02  # of all docstrings


def openings(source: str) -> list[str]:
    """The first words of the docstrings in ``source``, in lower case."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    given = (
        ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)
    )
    return [text.split()[0].strip("`*:,").lower() for text in given if text]


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    words = [word for path in PACKAGE.rglob("*.py") for word in openings(path.read_text())]
    relative = [word for word in words if word in RELATIVE]
    assert len(relative) <= MOST_RELATIVE * len(words), Counter(relative)


def test_an_opening_is_the_first_word_of_a_docstring() -> None:
    source = (
        '"""What: it is."""\nclass A:\n    def f(self):\n        """``Return``\n        it."""\n'
    )
    assert openings(source) == ["what", "return"]


def test_no_class_name_is_taken_twice() -> None:
    counts = Counter(each.name.rpartition(".")[2] for each in widths())
    assert {name for name, count in counts.items() if count > 1} == NAMES_TAKEN_TWICE


WIDE = """
from dataclasses import dataclass

class Wide:
    shared: int
    def __init__(self, a, b=1, *rest, c, **more):
        self.a, (self.b, self.c) = a, rest
        other.d = 1
        self.e.f = 2
    def later(self):
        self.g += 1
        with this as self.h:
            self.a = 3

@dataclass(frozen=True)
class Frozen:
    a: int
    b: int = 2
    def look(self):
        return self.a
"""


def test_what_counts_as_an_attribute_and_as_a_parameter() -> None:
    wide, frozen = house.class_widths({"p": (WIDE, False)})
    assert wide == house.ClassWidth("p.Wide", attributes=5, parameters=5, frozen=False)
    assert frozen == house.ClassWidth("p.Frozen", attributes=2, parameters=2, frozen=True)


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", ROOT / "scripts" / "house.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_report_of_a_checkout(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zero = tmp_path / "hf_zero" / "zero"
    zero.mkdir(parents=True)
    (zero.parent / "__init__.py").write_text("")
    (zero / "a.py").write_text("from hf_zero.zero import b\n" + WIDE)
    (zero / "b.py").write_text("def f():\n    from hf_zero.zero import a\n")
    script.report(tmp_path)
    printed = capsys.readouterr().out
    assert "zero.a <-> zero.b" in printed and "load time: 0" in printed
    assert "imports inside zero: 1" in printed
    assert "widest classes: zero.a.Wide 5" in printed
    assert "longest functions: zero.a.__init__ 4" in printed
