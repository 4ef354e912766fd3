"""The order of the checkpoints of a folder: by the saves, never by a clock."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_zero.checkpoint import find
from hf_zero.checkpoint.manifest import MANIFEST_NAME, Manifest
from tests.checkpoint.jobs import edit
from tests.helpers.engines import config_of, start
from tests.helpers.stacks import on_each_rank, run_steps


def training(model: nn.Module) -> Any:
    return start(model, torch.optim.AdamW(model.parameters(), 1e-2), config_of(1))


def steps(engine: Any, count: int) -> None:
    run_steps(engine, 0, range(engine.global_steps, engine.global_steps + count))


def set_back(folder: Path) -> None:
    """Give the manifest of ``folder`` the newest time of all."""
    os.utime(folder / MANIFEST_NAME, ns=(2**62, 2**62))


@on_each_rank(1)
def test_retention_and_resume_do_not_ask_the_clock(
    rank: int, model: nn.Module, tmp_path: Path
) -> None:
    engine = training(model)
    for _ in range(3):
        steps(engine, 1)
        engine.save_checkpoint(str(tmp_path))
    set_back(tmp_path / "global_step1")
    steps(engine, 1)
    engine.save_checkpoint(str(tmp_path), keep=2)
    assert find.tags_in(tmp_path) == ["global_step3", "global_step4"]
    (tmp_path / find.LATEST).unlink()
    set_back(tmp_path / "global_step3")
    assert find.newest_whole(tmp_path) == (tmp_path, "global_step4")
    engine.destroy()


@on_each_rank(1)
def test_a_run_that_went_back_is_newer_than_what_it_left(
    rank: int, model: nn.Module, tmp_path: Path
) -> None:
    engine = training(model)
    for _ in range(3):
        steps(engine, 2)
        engine.save_checkpoint(str(tmp_path))
    engine.load_checkpoint(str(tmp_path), "global_step2")
    steps(engine, 1)
    engine.save_checkpoint(str(tmp_path))
    assert find.tags_in(tmp_path)[-1] == "global_step3"
    steps(engine, 2)
    engine.save_checkpoint(str(tmp_path), keep=2)
    assert find.tags_in(tmp_path) == ["global_step3", "global_step5"]
    engine.destroy()


@on_each_rank(1)
def test_checkpoints_of_earlier_versions_come_first_by_step(
    rank: int, model: nn.Module, tmp_path: Path
) -> None:
    engine = training(model)
    for tag in ("b", "a", "c"):
        steps(engine, 1)
        engine.save_checkpoint(str(tmp_path), tag)
    for tag in ("a", "b"):
        edit(tmp_path / tag / MANIFEST_NAME, lambda manifest: manifest.pop("order"))
    set_back(tmp_path / "b")
    assert find.tags_in(tmp_path) == ["b", "a", "c"]
    shutil.copytree(tmp_path / "c", tmp_path / "copy")
    engine.save_checkpoint(str(tmp_path), "d")
    assert Manifest.read(tmp_path / "d" / MANIFEST_NAME).order == 4
    assert find.tags_in(tmp_path)[-1] == "d"
    (tmp_path / "d" / MANIFEST_NAME).write_text("{")  # damaged: the oldest
    assert find.tags_in(tmp_path)[0] == "d"
    engine.destroy()
