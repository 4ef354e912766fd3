"""Options and tables of scripts: tests of other libraries, coverage of kernels, locked wheels."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that imports a script."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module


SAID = """
FAILED tests/deepspeed/test_a.py::A::test_one[x-1] - AssertionError: no
FAILED tests/deepspeed/test_a.py::A::test_one[x-2] - AssertionError: no
ERROR tests/deepspeed/test_a.py::A::test_two - OSError: fixture
ERROR tests/deepspeed/test_b.py - ImportError: lacking
2 failed, 3 passed, 1 skipped, 2 errors in 4.00s
"""


def test_errors_count_in_the_table_of_a_library(scripts: Any) -> None:
    script = scripts("hugging_face_tests")
    text = script.table(script.LIBRARIES["accelerate"], "v1", SAID)
    assert "3 passed, 4 failed, 1 skipped" in text
    unknown = "not known yet:"
    assert f"| test_one | 2 | {unknown} AssertionError: no |" in text
    assert f"| test_two | 1 | {unknown} OSError: fixture |" in text
    assert f"| tests/deepspeed/test_b.py | 1 | {unknown} ImportError: lacking |" in text


def test_a_part_of_a_librarys_tests_is_no_table_and_writes_into_no_checkout(
    scripts: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = scripts("hugging_face_tests")
    table = script.LIBRARIES["accelerate"].table.read_text()
    run, words = Mock(return_value=SAID), ["--source", "checkout", "--also", "more", "-k", "one"]
    for name in ("checkout", "more"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "run", run)
    monkeypatch.setattr(script, "make_models", Mock())
    monkeypatch.setattr(sys, "argv", ["hugging_face_tests.py", "accelerate", *words])
    assert script.main() == 0
    _, source, _, also, only = run.call_args.args
    assert (source, also, only) == (tmp_path / "checkout", tmp_path / "more", "one")
    assert not any(source.iterdir()) and "3 passed, 4 failed" in capsys.readouterr().out
    assert script.LIBRARIES["accelerate"].table.read_text() == table


def test_the_release_of_a_coverage_is_read_as_argparse_reads_it(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, begun = scripts("coverage_of_kernels"), Mock(side_effect=SystemExit)
    releases = scripts("releases")
    monkeypatch.setattr(releases, "environments", lambda only, *_: {"": {"transformers": only[0]}})
    monkeypatch.setattr(releases, "overlays_below", lambda folder: tmp_path)
    monkeypatch.setattr(releases, "overlay", lambda name, release, *_: tmp_path / release)
    monkeypatch.setattr(script.os, "execve", begun)
    for words in (["--release", "oldest"], ["--release=oldest"], ["--rel", "oldest"]):
        monkeypatch.setattr(sys, "argv", ["coverage", "--json", *words, "--only", "bert"])
        with pytest.raises(SystemExit):
            script.main()
        _, command, environment = begun.call_args.args
        assert command[2:] == ["--json", "--only=bert"]
        assert environment["PYTHONPATH"].endswith("transformers=oldest")


def test_a_wheel_in_a_folder_with_a_space_has_an_address(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, ran = scripts("locked"), Mock(side_effect=SystemExit)
    monkeypatch.setattr(script.subprocess, "run", ran)
    (tmp_path / "lock").write_text("")
    with pytest.raises(SystemExit):
        script.main(str(tmp_path / "a folder" / "x.whl"), str(tmp_path / "lock"), "trl")
    asked = ran.call_args.args[0][-1]
    assert asked == f"hf-zero[trl] @ {(tmp_path / 'a folder' / 'x.whl').as_uri()}"
    assert "a%20folder" in asked
