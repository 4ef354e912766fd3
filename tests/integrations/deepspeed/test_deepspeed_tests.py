"""The table of DeepSpeed's own tests is that of the figures, and the script reads its reports."""

from __future__ import annotations

import importlib.util
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
REPORT = """<testsuites><testsuite>
<testcase classname="unit.test_a.TestA" name="test[1]"/>
<testcase classname="unit.test_a.TestA" name="test[2]"><skipped message="no"/></testcase>
<testcase classname="unit.test_a" name="test_b"><failure message="x">E   ValueError: wrong
unit/test_a.py:3: in test</failure></testcase>
</testsuite></testsuites>"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "figures", ROOT / "scripts" / "deepspeed_tests.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_that_of_the_figures(script: ModuleType) -> None:
    rows = json.loads(script.RAW.read_text())
    assert script.table(rows) == script.TABLE.read_text()


def test_reports_are_read(script: ModuleType) -> None:
    report = ElementTree.ElementTree(ElementTree.fromstring(REPORT))
    assert dict(script.results(report)) == {
        "TestA::test[1]": "passed",
        "TestA::test[2]": "skipped",
        "test_a::test_b": "ValueError: wrong",
    }


def test_the_tests_that_were_not_run_are_known(script: ModuleType) -> None:
    tree = "<Module test_a.py>\n  <Function test_b>\n  <Class TestA>\n    <Function test[1]>\n"
    assert list(script.collected(tree)) == ["test_a::test_b", "TestA::test[1]"]


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("import deepspeed\nfrom deepspeed.comm import all_reduce", "public"),
        ("from deepspeed.runtime.zero.stage3 import isclose, no_such", "internals"),
        ("from deepspeed.utils import logger\nfrom deepspeed.io import Writer", "mixed"),
    ],
)
def test_files_are_told_apart_by_what_they_import(
    script: ModuleType, source: str, kind: str, tmp_path: Path
) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(source)
    assert script.kind_of(file) == kind
