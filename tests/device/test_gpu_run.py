"""The one command for a GPU: what it installs, and a run of it from end to end."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import completed

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "scripts" / "bench"


# a Python that has nothing but torch, writes down what pip is asked for and installs nothing
BARE = """#!/bin/sh
case "$*" in
*find_spec*) shift 2; echo "$@" ;;
*"-m pip install"*)
    echo "$@" >"$ASKED"
    while [ "$1" != -c ]; do shift; done
    cat "$2" >"$ASKED.pinned"
    exit 1
    ;;
esac
"""


def third_party(path: Path) -> set[str]:
    """The packages that ``path`` imports, and those that modules of ``tests`` do which it names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        named = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            named = [node.module or ""]
        for name in named:
            below = ROOT / (name.replace(".", "/") + ".py")
            if name.startswith("tests.") and below.exists():
                found |= third_party(below)
            found.add(name.partition(".")[0])
    return found - {"tests", "hf_zero"} - sys.stdlib_module_names


def test_what_a_bare_machine_lacks_is_installed_first(tmp_path):
    bare, asked = tmp_path / "python", tmp_path / "asked"
    bare.write_text(BARE)
    bare.chmod(0o755)
    env = {**os.environ, "PYTHON": str(bare), "ASKED": str(asked)}
    script = [str(ROOT / "scripts" / "gpu"), "--out", str(tmp_path / "out")]
    assert subprocess.run(script, env=env, capture_output=True).returncode == 1
    pinned = {line.partition("==")[0] for line in Path(f"{asked}.pinned").read_text().splitlines()}
    assert "transformers" in pinned, "versions that were tested"
    # the torch that is there asks for a Triton of its own, which a pin would contradict
    assert not {"torch", "triton"} & pinned
    installed = set(asked.read_text().split())
    assert {"transformers", "psutil"} <= installed
    tests = [ROOT / "tests" / "conftest.py", *(ROOT / "tests" / "gpu").glob("*.py")]
    with_others = {"numpy", "triton", "safetensors", "huggingface_hub", "yaml", "_pytest"}
    # asked for by its own hook alone; a test skips itself without it
    optional = {"xdist", "torchao"}
    named = set().union(*map(third_party, tests))
    assert named - {"torch"} - with_others - optional <= installed


def test_a_tiny_run_from_the_command_to_the_table(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(BENCH / "gpu_run.py"), "--tiny", "--minutes", "10"]
    command += ["--only", "pinning", "--out", str(tmp_path)]
    said = completed(command, env=env, timeout=300)
    assert said.returncode == 0, said.stderr
    (path,) = tmp_path.glob("gpu-*-tiny.jsonl")
    head, ours, torchs = (json.loads(line) for line in path.read_text().splitlines())
    assert head["minutes"] == 10 and ours["of"] == "hf-zero" and torchs["of"] == "torch pin_memory"
    assert ours["device"] == "cpu, tiny" and ours["torch"] and 0.5 < ours["over_asked"] < 2
    assert "| pinning 8 GiB, s " in said.stdout
    assert "not measured" in said.stdout
    assert "mean nothing" in said.stdout
    table = said.stdout[said.stdout.index("| work") :]
    again = completed([*command[:2], "--table", str(path)], env=env, timeout=300)
    assert again.stdout == table


@pytest.mark.long
def test_large_models_tiny_from_the_command_to_the_page(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHON": sys.executable}
    command = [str(ROOT / "scripts/gpu"), "--large-models", "3", "--cpu", "--only", "131,072"]
    said = completed([*command, "--out", str(tmp_path)], env=env, timeout=400)
    assert said.returncode == 0, said.stderr
    (path,) = tmp_path.glob("large-models-3-cpu-*.jsonl")
    (row,) = map(json.loads, path.read_text().splitlines())
    assert row["tokens_s"] > 0 and row["first_step_s"] > 0 and row["foreseen_gib"] > 0, row
    assert "| LoRA of 8B, 131,072 tokens | lora |" in said.stdout
    wrong = completed([sys.executable, str(BENCH / "gpu_large.py"), "7"], env=env, timeout=60)
    assert wrong.returncode == 1 and "'7' is neither a part, 1 to 4, nor one of" in wrong.stderr
