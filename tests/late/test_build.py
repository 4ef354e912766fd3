"""The library is built once for each state of its sources, by one process of several, and is
part of no wheel.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers.commands import completed
from tests.late import build, launch


def test_processes_that_ask_at_once_build_once(tmp_path: Path) -> None:
    """With a compiler that notes its calls, and makes empty files."""
    launch.needs_the_device()
    fake, calls = tmp_path / "compiler", tmp_path / "calls"
    fake.write_text(
        f'#!/bin/sh\necho "$@" >> {calls}\nfor last; do :; done\nsleep 0.05; : > "$last"\n'
    )
    fake.chmod(0o755)
    env = launch.environment() | {"CXX": str(fake), "LATE_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "tests.late.build"]

    def built(_: int) -> str:
        return completed(command, env=env, cwd=launch.ROOT, check=True).stdout

    with ThreadPoolExecutor(3) as pool:
        paths = set(pool.map(built, range(3)))
    assert len(paths) == 1 and Path(paths.pop().strip()).is_relative_to(tmp_path)
    assert len(calls.read_text().splitlines()) == len(list(build.SOURCES.glob("*.cpp"))) + 1


def test_a_changed_source_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.cpp").write_text('#include "b.h"\n')
    (tmp_path / "b.h").write_text("int b;\n")
    (tmp_path / "c.cpp").write_text("int c;\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    whole, c = build.fingerprint(), build.fingerprint([tmp_path / "c.cpp"])
    (tmp_path / "b.h").write_text("long b;\n")
    assert build.fingerprint() != whole and build.fingerprint([tmp_path / "c.cpp"]) == c


def test_without_a_compiler_the_reason_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("LATE_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "C++20 compiler" in build.why_not()
    with pytest.raises(build.CannotBuild, match="C\\+\\+20 compiler"):
        build.library()


def test_no_wheel_has_it() -> None:
    """The packages that setuptools installs, by pyproject.toml, exclude tests/late."""
    from setuptools import find_namespace_packages

    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((launch.ROOT / "pyproject.toml").read_text())
    found = project["tool"]["setuptools"]["packages"]["find"]
    packages = find_namespace_packages(os.fspath(launch.ROOT), include=found["include"])
    assert "hf_zero.zero" in packages and not any("late" in name.split(".") for name in packages)
    assert "tests/late" not in (launch.ROOT / "setup.py").read_text()
