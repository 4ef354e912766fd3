"""The package as others install it."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import sys
import tomllib
import zipfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from hf_zero.checkpoint import storage
from hf_zero.errors import CheckpointError, ConfigError
from tests.helpers.commands import completed

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_one_least_version_of_python_is_named_everywhere() -> None:
    least = PROJECT["project"]["requires-python"].removeprefix(">=")
    names = " ".join(PROJECT["project"]["classifiers"])
    versions = re.findall(r"Python :: (3\.\d+)", names)
    assert min(versions, key=lambda name: int(name[2:])) == least
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + least.replace(".", "")
    assert PROJECT["tool"]["mypy"]["python_version"] == least
    promised = f"Python {least} to {max(versions, key=lambda name: int(name[2:]))}"
    for page in ("README.md", "hf_zero/docs/start.md"):
        assert promised in (ROOT / page).read_text()
    table = (ROOT / "hf_zero/docs/compatibility.md").read_text()
    assert all(f"| {version} |" in table for version in versions)


def fit_schema(schema: str, *files: Path) -> None:
    validator = pytest.importorskip("check_jsonschema")
    runner = pytest.importorskip("click.testing").CliRunner()
    arguments = ["--builtin-schema", f"vendor.{schema}", *map(str, files)]
    found = runner.invoke(validator.main, arguments)
    assert found.exit_code == 0, found.output


def test_the_workflows_are_valid_and_cover_each_version_of_python() -> None:
    """Every action is pinned by commit, and only a release may write to the repository."""
    schemas = {"workflows": "workflows/*", "issue-forms": "ISSUE_TEMPLATE/*"}
    for schema, names in schemas.items():
        checked = sorted((ROOT / ".github").glob(f"{names}.yml"))
        assert checked
        fit_schema(f"github-{schema}", *checked)
    fit_schema("dependabot", ROOT / ".github" / "dependabot.yml")
    files = (ROOT / ".github" / "workflows").glob("*.yml")
    workflows = {path.stem: yaml.safe_load(path.read_text()) for path in files}
    classifiers = " ".join(PROJECT["project"]["classifiers"])
    versions = re.findall(r"Python :: (3\.\d+)", classifiers)
    assert workflows["ci"]["jobs"]["test"]["strategy"]["matrix"]["python"] == versions
    wheels = PROJECT["tool"]["cibuildwheel"]["build"].split()
    assert wheels == [f"cp{version.replace('.', '')}-*" for version in versions]
    for workflow in workflows.values():
        assert workflow["permissions"] == {"contents": "read"} and workflow["concurrency"]
        for job in workflow["jobs"].values():
            assert job["timeout-minutes"]
            used = [step["uses"] for step in job["steps"] if "uses" in step]
            assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name) for name in used)
    writing = {
        (name, job): values["permissions"]
        for name, workflow in workflows.items()
        for job, values in workflow["jobs"].items()
        if "permissions" in values
    }
    write = dict.fromkeys(("contents", "id-token", "attestations"), "write")
    assert writing == {("release", "publish"): write}


def test_a_release_has_notes_of_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    notes = runpy.run_path(str(ROOT / "scripts" / "release_notes.py"))["notes"]
    version, text = (ROOT / "VERSION").read_text().strip(), (ROOT / "CHANGELOG.md").read_text()
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"file": "VERSION"}
    assert f"`{version}, alpha` · " in (ROOT / "README.md").read_text()
    sections = re.findall(r"^## (.*)$", text, re.MULTILINE)
    last = next(name.split(" - ")[0] for name in sections if name[0].isdecimal())
    assert "### Added" in notes(last, text) and "## " not in notes(last, text)[:3]
    newest = text.split("\n## ")[1]
    assert newest.count("\n") <= 80, "themes; each change is in the list behind them"
    for section in text.split("\n## ")[1:]:
        heads = re.findall(r"^### (.+)$", section, re.MULTILINE)
        assert len({*heads}) == len(heads), section.partition("\n")[0]
    if sections[0] == "Unreleased":
        assert Version(version).is_devrelease and Version(version) > Version(last)
    else:
        assert version == last
    with pytest.raises(SystemExit, match=r"no section `## 9\.0\.0 - DATE` with notes; write it"):
        notes("9.0.0", text)
    with pytest.raises(SystemExit, match="no section"):
        notes("2.0", "## 2.0 - 2026-01-01\n\n## 1.0 - 2025-01-01\n- text\n")


def test_each_requirement_has_a_least_version_that_ci_installs() -> None:
    """The job ``lowest`` resolves the package and these extras to their least versions."""
    bare = [name for name in PROJECT["project"]["dependencies"] if ">=" not in name]
    extras = PROJECT["project"]["optional-dependencies"]
    ci = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["lowest"]
    (resolved,) = [step["run"] for step in ci["steps"] if "lowest-direct" in step.get("run", "")]
    chosen = re.findall(r"--extra (\S+)", resolved)
    bare += [name for extra in chosen for name in extras[extra] if ">=" not in name]
    assert len(chosen) > 3 and bare == []
    (torch,) = [name for name in PROJECT["project"]["dependencies"] if name[:5] == "torch"]
    least = Requirement(torch)
    said = f"torch {least.specifier}".replace(">=", "")
    assert f"{said} or newer" in (ROOT / "hf_zero/docs/start.md").read_text()


def test_the_smoke_of_a_wheel_runs_the_core() -> None:
    pytest.importorskip("hf_zero._cpu")
    command = PROJECT["tool"]["cibuildwheel"]["test-command"].replace("{project}", str(ROOT))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = completed([sys.executable, *command.split()[1:]], timeout=100, env=env, check=True)
    assert "agree" in shown.stdout


def test_packages_of_extras_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "upath", None)
    said = r"s3://run cannot .* pip install 'hf-zero\[remote\]'"
    with pytest.raises(CheckpointError, match=said):
        storage.as_path("s3://run")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "hf_zero.integrations.datasets.analyze", raising=False)
    with pytest.raises(ConfigError, match=r"needs pyarrow; pip install 'hf-zero\[data\]'"):
        importlib.import_module("hf_zero.integrations.datasets.analyze")


def test_a_build_that_could_not_be_right_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old setuptools would refuse pyproject.toml without a word about its own version; without
    setuptools-scm it would go on, and leave the recipes out of an sdist.
    """
    from setuptools import Distribution

    monkeypatch.setattr("setuptools.setup", lambda **given: None)
    monkeypatch.chdir(ROOT)
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        commands = runpy.run_path(str(ROOT / "setup.py"))["commands"]
        for command in ("build_py", "sdist"):
            with pytest.raises(SystemExit, match="setuptools-scm, which is not installed: run pip"):
                commands[command](Distribution()).run()
    monkeypatch.setattr("setuptools.__version__", "65.5.0")
    with pytest.raises(SystemExit, match=r"77 or later, and 65\.5\.0 is .*'setuptools>=77'"):
        runpy.run_path(str(ROOT / "setup.py"))
    assert "setuptools>=77" in PROJECT["build-system"]["requires"]


@pytest.mark.long
def test_a_wheel_has_the_core_and_needs_no_compiler(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "-q", "--no-input"]
    env = {**os.environ, "HF_ZERO_REQUIRE_CORE": "1"}
    wheel = [*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT]
    completed(wheel, timeout=900, env=env, check=True)
    (built,) = tmp_path.glob("hf_zero-*.whl")
    names = zipfile.ZipFile(built).namelist()
    assert any(re.fullmatch(r"hf_zero/_cpu\..*so", name) for name in names)
    assert {"hf_zero.pth", "hf_zero/py.typed", "hf_zero/config/schema.json"} <= {*names}
    assert {"hf_zero/docs/index.md", "hf_zero/docs/errors.md"} <= {*names}
    assert not [name for name in names if name.startswith(("tests", "scripts", "recipes"))]
    (metadata,) = (name for name in names if name.endswith("dist-info/METADATA"))
    described = zipfile.ZipFile(built).read(metadata).decode()
    assert "Description-Content-Type: text/markdown" in described
    assert (ROOT / "README.md").read_text().splitlines()[0] in described
    completed([sys.executable, "-m", "venv", tmp_path / "bare"], check=True)
    python = tmp_path / "bare" / "bin" / "python"
    bare = {"PATH": str(python.parent), "HOME": str(tmp_path)}  # no compiler on the path
    install = [python, "-m", "pip", "-q", "--no-input", "install", "--no-deps", built]
    completed(install, timeout=300, env=bare, check=True)
    code = "import hf_zero, hf_zero._cpu; print(hf_zero.__version__, hf_zero.__file__)"
    shown = completed([python, "-c", code], env=bare, cwd=tmp_path, check=True)
    version, where = shown.stdout.split()
    assert version in built.name and where.startswith(str(tmp_path / "bare"))


@pytest.mark.long
def test_a_wheel_without_a_compiler_fails_where_the_core_is_required(tmp_path: Path) -> None:
    env = {**os.environ, "HF_ZERO_REQUIRE_CORE": "1", "CC": "false", "CXX": "false"}
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT]
    refused = completed(wheel, timeout=900, env=env)
    assert refused.returncode and not [*tmp_path.glob("*.whl")]
    del env["HF_ZERO_REQUIRE_CORE"]
    said = completed([*wheel, "-v"], timeout=900, env=env, check=True)
    assert "the native core was not built" in said.stdout + said.stderr


def test_constraints_pin_all_that_the_tests_and_the_recipes_install() -> None:
    """Each requirement of ``hf-zero[test,recipes]`` on this platform, with those of what is
    installed.
    """
    pinned = {
        canonicalize_name(line.partition("==")[0])
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    }
    extras, seen = PROJECT["project"]["optional-dependencies"], set[tuple[str, str]]()
    named = (*PROJECT["project"]["dependencies"], *extras["test"], *extras["lint"], *extras["docs"])
    named += tuple(extras["recipes"])
    wanted = [(each, "") for each in named]
    while wanted:
        text, extra = wanted.pop()
        asked = Requirement(text)
        name = canonicalize_name(asked.name)
        if asked.marker is not None and not asked.marker.evaluate({"extra": extra}):
            continue
        if name == "hf-zero":
            wanted += [(each, "") for own in asked.extras for each in extras[own]]
            continue
        if [each.operator for each in asked.specifier] == ["=="]:
            continue  # as torch names the releases of CUDA's libraries
        for own in ("", *asked.extras):
            if (name, own) not in seen:
                seen.add((name, own))
                with suppress(metadata.PackageNotFoundError):
                    wanted += [(each, own) for each in metadata.requires(name) or ()]
    assert {name for name, _ in seen} - pinned - {"setuptools"} == set(), "pin these"


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    yield importlib.import_module("locked")
    sys.modules.pop("locked")


def test_the_lock_has_the_pins_of_the_constraints(locked: Any) -> None:
    """With the hashes of files for x86-64 and arm64, and of all that the package requires."""
    pins = locked.read_lock((ROOT / "scripts" / "requirements.lock").read_text())
    constraints = locked.read_lock((ROOT / "constraints.txt").read_text())
    shared = pins.keys() & constraints.keys()
    for name in shared:
        assert {pin.version for pin in pins[name]} == {pin.version for pin in constraints[name]}
    assert all(pin.hashes for each in pins.values() for pin in each)
    assert all(
        re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", h) for p in pins["torch"] for h in p.hashes
    )
    extras = PROJECT["project"]["optional-dependencies"]
    named = [extra for extra in extras if extra not in ("docs", "dev", "test", "lint")]
    head = (ROOT / "scripts" / "requirements.lock").read_text().partition("\naccelerate")[0]
    assert {*re.findall(r"--extra (\w+)", head)} == {*named}
    requirements = [*PROJECT["project"]["dependencies"], *(r for e in named for r in extras[e])]
    least = {Requirement(each).name for each in requirements} - {"hf-zero"}
    assert {canonicalize_name(name) for name in least} <= pins.keys()


def test_only_files_of_the_lock_are_installed(
    locked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = tmp_path / "requirements.lock"
    lines = [
        *("# head", "a-b==1 ; python_version < '3.12' \\", "    --hash=sha256:1 \\"),
        *("    --hash=sha256:2", "a-b==2 --hash=sha256:3", "torch==2 --hash=sha256:4"),
    ]
    lock.write_text("\n".join(lines))
    resolved = {"A_b": "2", "torch": "2+cpu", "hf-zero": "0.2.0"}
    ran: list[list[str]] = []
    files: list[str] = []

    def pip(command: Any, check: bool) -> None:
        words = [str(word) for word in command]
        ran.append(words)
        if "--report" in words:
            rows = [{"metadata": {"name": n, "version": v}} for n, v in resolved.items()]
            Path(words[words.index("--report") + 1]).write_text(json.dumps({"install": rows}))
            pins = Path(words[words.index("--constraint") + 1]).read_text()
            assert pins.splitlines() == ["a-b==1 ; python_version < '3.12'", "a-b==2", "torch==2"]
        if "-r" in words:
            files.append(Path(words[words.index("-r") + 1]).read_text())

    monkeypatch.setattr(locked.subprocess, "run", pip)
    locked.main("hf_zero-0.2.0-py3-none-any.whl", str(lock), "trl")
    assert files == ["a-b==2 --hash=sha256:3\n"]
    assert "--require-hashes" in ran[1] and "--no-deps" in ran[1]
    assert ran[2][-3:] == ["--no-deps", "torch==2+cpu", "hf_zero-0.2.0-py3-none-any.whl"]
    assert "torch==2+cpu: not of the package index, installed without" in capsys.readouterr().out
    resolved |= {"other": "1", "a.b": "7"}
    with pytest.raises(SystemExit, match=r"other==1, a-b==7: not in requirements\.lock; update it"):
        locked.main("hf_zero.whl", str(lock))
