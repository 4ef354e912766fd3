"""The tutorials, and the whole scripts of other pages."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from hf_zero.cli.docs import FOLDER
from tests.docs.documents import LINK, blocks, of_kind
from tests.docs.test_pages import commands_in
from tests.helpers.commands import completed
from tests.helpers.launched import environment

TUTORIALS = {
    "trl-peft": "runs/sft/model/adapter_model.safetensors",
    "pretrain": "runs/pretrain/model.safetensors",
    "from-deepspeed": "model/model.safetensors",
    "from-fsdp": "runs/fsdp/model/model.safetensors",
    "restart": "runs/resume/best/model.safetensors",
    "long-sequences": "runs/long/model/model.safetensors",
    "rollout": "runs/rollout/model/model.safetensors",
}
"""What a tutorial has made in the end, by page."""
ROUTES = sorted({block.page for block in of_kind("python") if block.title} - {*TUTORIALS})
# reaches "another host" on this machine: the line that hf-zero launch would give ssh
ANOTHER_HOST = '#!/bin/sh\nshift\nexec sh -c "$*"\n'


def commands(page: str) -> list[str]:
    """The commands of the blocks ``sh``, and of a page that is no tutorial, those of its script."""
    lines = [line for b in blocks(page) if b.kind == "sh" for line in commands_in(b.text)]
    if page in ROUTES:
        return [line for line in lines if "train.py" in shlex.split(line)]
    return [line for line in lines if not line.startswith("pip install ")]


def test_the_index_begins_with_the_tutorials() -> None:
    first = (FOLDER / "index.md").read_text().partition("## ")[2].partition("\n## ")[0]
    assert first.startswith("Tutorials\n")
    assert [found[0].removesuffix(".md") for found in LINK.findall(first)] == [*TUTORIALS]
    assert all(len(commands(page)) > 1 for page in TUTORIALS)
    assert len(ROUTES) == 5 and all(commands(page) for page in ROUTES)


@pytest.mark.long
@pytest.mark.parametrize("page", [*TUTORIALS, *ROUTES])
def test_a_page_runs(page: str, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    for block in blocks(page):
        if block.title:
            (folder / block.title).write_text(block.text)
    ssh = tmp_path / "ssh"
    ssh.write_text(ANOTHER_HOST)
    ssh.chmod(0o755)
    scripts = Path(sys.executable).parent
    env = environment() | {"HF_ZERO_SSH": str(ssh), "HOME": str(tmp_path)}
    env["PATH"] = f"{scripts}{os.pathsep}{os.environ['PATH']}"
    for command in commands(page):
        program, *arguments = shlex.split(command, comments=True)
        port = {"PET_STANDALONE": "1"} if program == "torchrun" else {}  # a port of its own
        ran = completed([scripts / program, *arguments], timeout=300, cwd=folder, env=env | port)
        assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
    made = sorted(map(str, folder.rglob("*.safetensors")))
    assert page == "lightning" or any(each.endswith(TUTORIALS.get(page, "")) for each in made), made
