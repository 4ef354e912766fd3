"""The tutorials, and the whole scripts of other pages."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.cli.doc_search import FOLDER
from tests.docs.documents import LINK, blocks, of_kind
from tests.docs.test_pages import commands_in
from tests.helpers.cells import in_turn
from tests.helpers.commands import completed
from tests.helpers.engines import config_of, start
from tests.helpers.launched import environment
from tests.helpers.oracle import compare_tensors
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import stack

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


@in_turn("stage", [1, 3])
def test_the_average_in_the_loop_is_that_of_plain_torch(stage: int) -> None:
    (block,) = [each for each in blocks("loop") if "update_average" in each.text]
    batches = torch.randn(4, 4, 7, generator=torch.Generator().manual_seed(0))
    models = [stack(), stack()]

    def averaged(rank: int) -> dict[str, torch.Tensor]:
        model = models[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        engine = start(model, optimizer, config_of(stage, zero_optimization=zero))
        names: dict[str, Any] = {
            "torch": torch, "hf_zero": hf_zero, "model": model, "engine": engine
        }  # fmt: skip
        exec(block.text, names)
        for batch in batches:
            engine.backward(engine(batch.chunk(2)[rank]).square().mean())
            engine.step()
            names["update_average"](0.8)
        engine.destroy()
        return dict(names["average"])

    plain, expected = stack(), dict[str, torch.Tensor]()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        plain(batch).square().mean().backward()
        optimizer.step()
        for name, value in plain.named_parameters():
            now = value.detach().clone()
            expected[name] = 0.8 * expected.get(name, now) + 0.2 * now
    found, nothing = run_ranks(2, averaged)
    assert nothing == {}
    compare_tensors("average", found, expected)
