"""Trainers that save into the memory of the hosts, fail, and go on from the newer of memory and
disk as if nothing had happened.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf_zero.checkpoint import save_job
from hf_zero.checkpoint.memory import saving
from hf_zero.integrations.checkpoint_folders import trainer_folder_error
from tests.helpers.plain_process import forget
from tests.helpers.trainers import ROUTES, logged, routed, rows, weights


class Failing(transformers.TrainerCallback):
    """Fails in the middle of step ``at``, once the save before is whole."""

    def __init__(self, at: int | None) -> None:
        self.at, self.trainer = at, None

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == self.at:
            self.trainer.deepspeed.memory.wait()
            raise RuntimeError("failed on purpose")


def memory(folder: Path, async_save: bool = False) -> dict[str, Any]:
    section = {"every": 2, "folder": str(folder / "memory"), "job": "job"}
    return {"checkpoint": {"memory": section, "async_save": async_save}}


def made(route: str, folder: Path, **changes: Any) -> transformers.Trainer:
    """A Trainer of eight steps, three an epoch, with dropout and rows in random order."""
    run = routed(
        route, 2, folder / "run", train_dataset=rows("bert", 12), max_steps=8,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, lr_scheduler_type="cosine",
        **changes,
    )  # fmt: skip
    for module in run.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2
    return run


def train(
    route: str,
    folder: Path,
    fails: int | None = None,
    resume: Any = None,
    async_save: bool = False,
    **changes: Any,
) -> transformers.Trainer:
    """One attempt of the job, which saves into memory at each second step."""
    forget()
    saving._claimed.clear()  # the processes before are gone
    failing = Failing(fails)
    run = made(route, folder, config=memory(folder, async_save), callbacks=[failing], **changes)
    failing.trainer = run
    if fails is None:
        run.train(resume_from_checkpoint=resume)
    else:
        with pytest.raises(RuntimeError, match="on purpose"):
            run.train(resume_from_checkpoint=resume)
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, Any]]:
    """Losses and weights of the run that nothing interrupts, and that saves nothing in memory."""
    forget()
    run = made("ours", tmp_path_factory.mktemp("whole"))
    run.train()
    return logged(run), weights(run)


def same(run: transformers.Trainer, whole: Any) -> None:
    assert logged(run) == whole[0]
    found = weights(run)
    assert all(torch.equal(found[name], value) for name, value in whole[1].items())


@pytest.mark.parametrize("route", ROUTES)
def test_a_run_goes_on_from_memory(route: str, tmp_path: Path, whole: Any) -> None:
    train(route, tmp_path, fails=5)
    run = train(route, tmp_path, resume=True)
    assert run._initial_global_step == 4
    assert run.deepspeed.memory.by_route
    same(run, whole)


def test_twice_and_across_an_epoch(tmp_path: Path, whole: Any) -> None:
    train("ours", tmp_path, fails=3)
    train("ours", tmp_path, fails=7, resume=True)
    run = train("ours", tmp_path, resume=True)
    assert run._initial_global_step == 6
    same(run, whole)
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").glob("checkpoint-*"))


@pytest.mark.parametrize(("every", "named", "begins"), [(5, None, 5), (3, 3, 4), (1, 3, 3)])
def test_the_newer_of_memory_and_disk_is_taken(
    every: int, named: int | None, begins: int, tmp_path: Path, whole: Any
) -> None:
    """One that is not the last is taken from the disk."""
    saved = {"save_strategy": "steps", "save_steps": every}
    train("ours", tmp_path, fails=5, **saved)
    resume = str(tmp_path / "run" / f"checkpoint-{named}") if named else True
    run = train("ours", tmp_path, resume=resume, **saved)
    assert run._initial_global_step == begins
    same(run, whole)


def test_the_folder_in_memory_is_that_of_a_checkpoint(tmp_path: Path) -> None:
    """It has the files that the Trainer saves on disk, but for those of ``save_model``."""
    saved = {"save_strategy": "steps", "save_steps": 4}
    train("ours", tmp_path, fails=5, **saved)
    # the save on disk of the same step would be taken
    disk = shutil.move(tmp_path / "run" / "checkpoint-4", tmp_path / "kept")
    train("ours", tmp_path, fails=5, resume=True)
    folder = next((tmp_path / "memory").rglob("resume"))

    def names(root: Path) -> set[str]:
        made = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
        return {name for name in made if "zero_to_fp32" not in name}

    assert names(folder) == names(disk) - {"config.json", "model.safetensors", "training_args.bin"}
    assert trainer_folder_error(folder) == ""


def test_a_save_on_disk_at_the_same_step_shares_the_copy(
    tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    copy = save_job.copy_to_memory
    monkeypatch.setattr(save_job, "copy_to_memory", lambda *given: copied.append(1) or copy(*given))
    saved = {"save_strategy": "steps", "save_steps": 4}
    train("ours", tmp_path, fails=5, async_save=True, **saved)
    shutil.rmtree(tmp_path / "memory")
    run = train("ours", tmp_path, resume=True, async_save=True, **saved)
    assert run._initial_global_step == 4 and not copied
    same(run, whole)
