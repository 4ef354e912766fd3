"""The end of scripts/quickstart: the commands of its last table, in the environment it makes."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rich.console import Console

from scripts import environment, recording
from tests.helpers.commands import completed

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "scripts" / "quickstart"

# Runs hf-zero where the modules of its first argument are not installed.
WITHOUT = """
import sys
from importlib.abc import MetaPathFinder
hidden = set(sys.argv.pop(1).split(","))
class Hiding(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hiding())
sys.argv[0] = "hf-zero"
from hf_zero.cli import main
main()
"""


def installed(extras: list[str]) -> set[str]:
    """Return the distributions that an environment with ``extras`` of the package has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    waiting = [*project["dependencies"], *(line for extra in extras for line in optional[extra])]
    found: set[str] = set()
    while waiting:
        asked = Requirement(waiting.pop())
        name = canonicalize_name(asked.name)
        if asked.marker is not None and not asked.marker.evaluate({"extra": ""}):
            continue
        if name not in found:
            found.add(name)
            try:
                waiting += requires(name) or ()
            except PackageNotFoundError:
                continue
    return found


def absent(extras: list[str]) -> str:
    """Return the modules of this environment that one with ``extras`` does not have."""
    has = installed(extras)
    of = packages_distributions()
    kept = {name for name, owners in of.items() if has & {*map(canonicalize_name, owners)}}
    return ",".join(sorted(of.keys() - kept - {"hf_zero", "pip", "setuptools"}))


def commands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the commands in the last table about the run in ``folder``."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import cards
    import quickstart_summary

    run = cards.rows()["bert-mlm"]["quickstart"] | {
        "checkpoint": f"{folder}/step_3",
        "model": f"{folder}/model",
    }
    console = Console(width=1000)
    with console.capture() as shown:
        console.print(quickstart_summary.table(run))
    return re.findall(r"│ (hf-zero .*?)\s+│", shown.get())


def test_the_commands_of_the_last_table_run_in_the_environment_of_the_quickstart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = QUICKSTART.read_text()
    match = re.search(r"^prepare_environment([^#\n]*)", text, re.MULTILINE)
    assert match is not None
    extras = match[1].split()
    assert {*extras} <= environment.SIZES.keys(), "what is announced counts them"
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    asked = commands(tmp_path, monkeypatch)
    assert asked == [f"hf-zero report {tmp_path}"] and 'hf-zero report "$run"' in text
    pytest.importorskip("vl_convert", reason="pip install 'hf-zero[report]'")
    hidden = absent(extras)
    assert {"pytest", "trl", "lightning"} & {*hidden.split(",")}
    for command in asked:
        line = [sys.executable, "-c", WITHOUT, hidden, *command.split()[1:]]
        done = completed(line, cwd=tmp_path)
        assert done.returncode == 0 and (tmp_path / "report.html").is_file(), done.stderr
    bare = completed([sys.executable, "-c", WITHOUT, absent([]), *asked[0].split()[1:]])
    assert bare.returncode == 2 and "hf-zero[report]" in bare.stderr, "the test sees what is absent"


def test_the_caption_of_the_picture_leaves_room_for_the_dots() -> None:
    rows = recording.rows_of(recording.latest())
    for cpu in (rows[0]["cpu"], "Intel(R) Xeon(R) Platinum 8480C Processor with a long name" * 2):
        rows[0]["cpu"] = cpu
        drawn = recording.drawing(rows, "light")
        dots = max(float(x) + 5 for x in re.findall(r'<circle cx="([\d.]+)"', drawn))
        match = re.search(r'<text x="([\d.]+)" y="19"[^>]*font-size="11"[^>]*>([^<]+)<', drawn)
        assert match is not None
        assert float(match[1]) - len(match[2]) * 11 * 0.6 > dots
