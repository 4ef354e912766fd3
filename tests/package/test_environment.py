"""The environment that scripts/quickstart and scripts/test install, over an interpreter and a pip
that a shell script stands in for.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
import tomllib
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts import environment as script
from tests.helpers.commands import completed

ROOT = Path(__file__).resolve().parents[2]
SOURCED = ROOT / "scripts" / "environment.sh"

# A stand-in for .venv/bin/python: appends its arguments to `calls`, answers as `answers` says.
STUB = """#!/bin/sh
echo "$@" >>"{folder}/calls"
env >"{folder}/variables"
case "$*" in
    *--version*) exit {pip} ;;
    *find_spec*) exit {found} ;;
    *"pip index"*torch*) echo "{versions}"; exit {torch} ;;
    *"pip index"*) exit {index} ;;
    *{absent}*) cat "{folder}/said"; exit 1 ;;
esac
"""
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A virtual environment of this Python whose pip installs whatever it is asked for."""
    made = tmp_path / "venv"
    (made / "bin").mkdir(parents=True)
    (made / "pyvenv.cfg").write_text("version = {}.{}.{}\n".format(*sys.version_info))
    monkeypatch.setattr(script, "has_nvidia_driver", lambda: False)
    answer(made)
    return made


def answer(
    folder: Path,
    absent: str = "nothing",
    said: str = "",
    *,
    versions: str | None = None,
    torch: int = 0,
    index: int = 0,
    pip: int = 0,
    found: int = 0,
) -> None:
    """Let pip fail with the output ``said`` for arguments that contain ``absent``, and answer
    ``pip index versions torch`` with ``versions``; the others are exit codes of this command, of
    that for another package, of ``pip --version`` and of the search for what was installed.
    """
    (folder / "said").write_text(said)
    python = folder / "bin" / "python"
    known = f"torch ({script.pinned('torch')}+cpu)" if versions is None else versions
    codes = {"torch": torch, "index": index, "pip": pip, "found": found}
    python.write_text(STUB.format(folder=folder, absent=absent, versions=known, **codes))
    python.chmod(0o755)


def prepare(folder: Path, *extras: str, **variables: str) -> list[str]:
    """Return the calls of ``pip install`` that an installation makes."""
    if folder.is_dir():
        (folder / "calls").write_text("")
    script.Environment(folder, variables).prepare(extras)
    return re.findall("-m pip install.*", (folder / "calls").read_text())


def test_one_environment_grows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch, package = prepare(folder)
    assert torch.endswith("+cpu --retries 2 --timeout 20") and "--no-deps" in torch
    assert package.endswith(f"--editable {ROOT}") and "-c " in package
    said = capsys.readouterr().out
    assert "MB to download" in said and "GB on disk" in said and "min at" in said
    assert prepare(folder) == [] and "is up to date" in capsys.readouterr().out
    assert prepare(folder, "test", "lint")[-1].endswith(f"--editable {ROOT}[lint,test]")
    assert prepare(folder, "test") == prepare(folder) == []
    assert prepare(folder, "docs")[-1].endswith("[docs,lint,test]")
    assert not (folder / "tmp").exists()


ABSENT = "ERROR: No matching distribution found for torch==2.13.0+cpu\n"


def test_the_ordinary_build_comes_where_there_is_none_for_cpus(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for said, why in (("torch (2.12)", "no build for CPUs"), ("NameResolutionError", "be reached")):
        (folder / "hf-zero.json").unlink(missing_ok=True)
        answer(folder, versions=said, torch=int(why == "be reached"))
        assert prepare(folder)[0].endswith(f"torch==={script.pinned('torch')}")
        reason, line, _ = capsys.readouterr().out.splitlines()
        assert why in reason and "HF_ZERO_TORCH=cpu" in reason
        assert f"{script.SIZES['cuda'][0]:,} MB to download" in line, "and no other size"
        assert script.Stamp.read(folder / "hf-zero.json").torch == "cuda"


def test_what_is_installed_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in script.ELSEWHERE:  # settings of pip do not count
        monkeypatch.setenv(name, "/elsewhere")
    half, whole = packaged(folder, "half"), packaged(folder, "whole")
    (whole / "INSTALLER").write_text("pip\n")  # which pip writes last
    prepare(folder, "test", HF_ZERO_TORCH="cuda")
    assert whole.exists() and not half.exists()
    assert "-I -m pip" in (folder / "calls").read_text()
    assert "/elsewhere" not in (folder / "variables").read_text()
    answer(folder, "editable", "ERROR: no\n")
    with pytest.raises(script.Refused, match="pip failed: no"):
        prepare(folder, "lint")
    answer(folder)
    torch, package = prepare(folder)  # with the build and the extras of before
    assert torch.endswith(f"==={script.pinned('torch')}") and package.endswith("[lint,test]")
    monkeypatch.setattr(script, "digest", lambda: "another")
    assert prepare(folder)[-1].endswith("[lint,test]")


def packaged(folder: Path, name: str) -> Path:
    """Return the metadata of an installed package."""
    made = folder / "lib/python3.11/site-packages" / f"{name}-1.dist-info"
    made.mkdir(parents=True)
    return made


def version(patch: pytest.MonkeyPatch, *numbers: int) -> None:
    patch.setattr(sys, "version_info", (*numbers, "final", 0))


MACHINES: list[tuple[Callable[[pytest.MonkeyPatch, Path], Any], str]] = [
    (lambda patch, _: patch.setattr(sys, "platform", "darwin"), "darwin.*container"),
    (lambda patch, _: version(patch, 3, 10, 4), "Python 3.10.4.*3.11 to 3.14"),
    (
        lambda _, folder: (folder / "pyvenv.cfg").write_text("version = 3.9.1\n"),
        "3.9.*rm -r.*HF_ZERO_VENV",
    ),
    (
        lambda _, folder: [(folder / "pyvenv.cfg").unlink(), (folder / "thesis").touch()],
        "no virtual environment.*HF_ZERO_VENV",
    ),
    (
        lambda patch, _: patch.setattr(shutil, "disk_usage", lambda path: Usage(9e12, 9e12, 10**8)),
        "0.1 GB free.*HF_ZERO_VENV",
    ),
]


@pytest.mark.parametrize(("change", "said"), MACHINES, ids=[said for _, said in MACHINES])
def test_a_machine_that_cannot_take_it(
    change: Any, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch, folder)
    with pytest.raises(script.Refused, match=said) as refused:
        prepare(folder)
    assert "\n" not in str(refused.value)


def test_a_build_that_does_not_exist(folder: Path) -> None:
    with pytest.raises(script.Refused, match="HF_ZERO_TORCH is 'rocm'; it takes cpu or cuda"):
        prepare(folder, HF_ZERO_TORCH="rocm")
    answer(folder, "+cpu", ABSENT)
    with pytest.raises(script.Refused, match=r"no release of torch==\S+\+cpu for Python"):
        prepare(folder, HF_ZERO_TORCH="cpu")
    lost = f"WARNING: NameResolutionError\n{ABSENT}"
    answer(folder, "+cpu", lost)
    said = (
        r"PyTorch's index, \S+, cannot be reached \(NameRes.*PIP_FIND_LINKS, or set HF_ZERO_TORCH"
    )
    with pytest.raises(script.Refused, match=said):
        prepare(folder, HF_ZERO_TORCH="cpu")
    answer(folder, "+cpu", lost, index=1)
    with pytest.raises(script.Refused, match="the package index cannot be reached"):
        prepare(folder, HF_ZERO_TORCH="cpu")
    # without a network no gigabytes are promised
    (folder / "hf-zero.json").unlink()
    answer(folder, versions=lost.replace("\n", " "), torch=1, index=1)
    with pytest.raises(script.Refused, match="the package index cannot be reached"):
        prepare(folder)


@pytest.mark.parametrize(("expected", "of"), [(5300, " of 5,300"), (0, "")])
def test_output_into_a_file_has_a_line_now_and_then(
    expected: int,
    of: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script.Progress, "LINES_SECONDS", 0.01)
    progress = script.Progress(folder, expected)
    progress.line("Downloading torch-2.13.0-cp311-linux_x86_64.whl (200 MB)")
    line = ""
    limit = time.monotonic() + 60.0
    while "downloading torch" not in line and time.monotonic() < limit:
        line += capsys.readouterr().out
    progress.stop()
    assert re.search(rf"^environment: \d+{of} MB  0:\d\d  downloading torch$", line, re.MULTILINE)


OUTPUTS = {
    "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device": (
        "the disk is full; make room"
    ),
    "ERROR: HTTP error 403 while getting https://index.example/packages/ab/ruff-0.17-x.whl": (
        "refuses ruff (403); allow it there, or name another index in PIP_INDEX_URL"
    ),
    "WARNING: Retrying after ProxyError('Cannot connect to proxy.', OSError('Tunnel connection "
    "failed: 403 Forbidden'))': /simple/torch/\nERROR: No matching distribution found for torch": (
        "refuses torch (a proxy)"
    ),
    "The conflict is caused by:\n    torch 2.13.0 depends on triton==3.7.1\n    The user requested "
    "(constraint) triton==3.9.0": (
        "pins contradict each other: torch 2.13.0 depends on triton==3.7.1; The user requested"
    ),
    "ERROR: something else": "pip failed: something else",
}


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_failure_of_pip_is_one_line(output: str, folder: Path) -> None:
    answer(folder, "editable", output)
    with pytest.raises(script.Refused) as refused:
        prepare(folder)
    said = str(refused.value)
    assert OUTPUTS[output] in said and str(folder / "install.log") in said and "\n" not in said
    assert not script.Stamp.read(folder / "hf-zero.json").files


def interpreters(folder: Path, **versions: str) -> dict[str, str]:
    """Return an environment whose PATH has nothing but interpreters of these versions; "!" after
    one says that it has no ensurepip.
    """
    for name, version in versions.items():
        path = folder / name.replace("_", ".")
        bare = "case $2 in *ensurepip*) exit 1;; esac\n" if version.endswith("!") else ""
        path.write_text(f"#!/bin/sh\n{bare}echo {version.rstrip('!')}\n")
        path.chmod(0o755)
    (folder / "dirname").symlink_to(shutil.which("dirname") or "")
    return {"PATH": str(folder), "HF_ZERO_VENV": str(folder / "venv")}


def chosen(variables: dict[str, str]) -> Any:
    command = [shutil.which("bash"), "-c", f"source '{SOURCED}' && find_interpreter"]
    return completed(command, env=variables)


@pytest.mark.parametrize(
    ("versions", "variables", "words"),
    [
        ({"python3": "3.10.1"}, {}, ["python3 is 3.10.1", "set PYTHON"]),
        ({}, {}, ["no Python 3.11 to 3.14", "set PYTHON"]),
        ({"python3": "3.11.2!"}, {}, ["lacks ensurepip", "apt-get install python3.11-venv"]),
        ({"python3": "3.12.0"}, {"PYTHON": "/opt/no such/python"}, ["/opt/no such/python"]),
    ],
)
def test_a_python_that_cannot_be_used_is_named(
    versions: dict[str, str], variables: dict[str, str], words: list[str], tmp_path: Path
) -> None:
    done = chosen({**interpreters(tmp_path, **versions), **variables})
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert all(word in done.stderr for word in words), done.stderr


def test_the_pythons_of_the_scripts_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    promised = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    text = SOURCED.read_text()
    assert [*reversed(re.findall(r"python(3\.\d+) ", text))] == promised
    assert " | ".join(f"{version}.*" for version in promised) in text
    assert f"{promised[0]} to {promised[-1]}" in text
    assert [f"{major}.{minor}" for major, minor in script.PYTHONS] == [promised[0], promised[-1]]
    assert os.access(ROOT / "scripts/quickstart", os.X_OK)
