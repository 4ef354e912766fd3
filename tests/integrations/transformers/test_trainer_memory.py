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

from hf_zero.checkpoint.memory import saving
from hf_zero.integrations.checkpoint_folders import trainer_folder_error
from tests.helpers.plain_process import forget
from tests.helpers.trainers import began_at, logged, routed, rows, weights


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
        run.deepspeed.wait_for_checkpoint()  # as a process does before it ends
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


def test_a_run_goes_on_from_memory_by_every_route_and_across_an_epoch(
    tmp_path: Path, whole: Any
) -> None:
    train("ours", tmp_path, fails=3)
    train("stock", tmp_path, fails=7, resume=True)
    run = train("callback", tmp_path, resume=True)
    assert began_at(run) == 6
    assert run.deepspeed.memory.by_route
    same(run, whole)
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").glob("checkpoint-*"))


def test_the_newer_of_memory_and_disk_is_taken(tmp_path: Path, whole: Any) -> None:
    """A folder that is named and not the last is taken from the disk."""
    saved = {"save_strategy": "steps", "save_steps": 1}
    train("ours", tmp_path, fails=5, **saved)
    folder = tmp_path / "run"
    third = str(folder / "checkpoint-3")
    for begins, resume in ((3, third), (5, True)):
        run = train("ours", tmp_path, fails=begins, resume=resume, **saved)
        assert began_at(run) == begins
    for step in (4, 5):
        shutil.move(folder / f"checkpoint-{step}", tmp_path / f"kept-{step}")
    train("ours", tmp_path, fails=4, resume=third)
    unpacked = next((tmp_path / "memory").rglob("resume"))

    def names(root: Path) -> set[str]:
        made = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
        return {name for name in made if "zero_to_fp32" not in name}

    model = {"config.json", "model.safetensors", "training_args.bin"}
    assert names(unpacked) == names(tmp_path / "kept-4") - model
    assert trainer_folder_error(unpacked) == ""
    run = train("ours", tmp_path, resume=third)
    assert began_at(run) == 4
    same(run, whole)
