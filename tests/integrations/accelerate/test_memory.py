"""Loops of Accelerate that save into the memory of the hosts between their steps, fail, and go on
by ``load_state()`` as if nothing had happened.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch.utils.data import DataLoader

from hf_zero.checkpoint.memory import checkpoints_of, saving
from hf_zero.errors import CheckpointError, ConfigError
from tests.helpers.plain_process import forget
from tests.integrations.accelerate.test_checkpoints import Counter
from tests.integrations.accelerate.test_loop import accelerator_with, batches, small

STEPS, EPOCHS, BATCHES = 12, 3, 4  # twelve steps, each of one batch


class Loop:
    """A loop over shuffled batches with dropout, a schedule and a counter of its own.

    ``fetched``: it holds its batches itself; ``evaluates``: its steps end with an evaluation.
    """

    def __init__(
        self, folder: Path, every: int | None, named: bool, run: str = "run", **how: bool
    ) -> None:
        forget()
        saving._claimed.clear()  # the processes before are gone
        self.how = how
        naming = ProjectConfiguration(
            project_dir=str(folder / run), automatic_checkpoint_naming=named
        )
        memory = {"every": every, "folder": str(folder / "memory"), "job": "job"}
        self.accelerator: Accelerator = accelerator_with(
            {"zero_optimization": {"stage": 2}, "checkpoint": {"memory": memory}},
            project_config=naming,
            dataloader_config=DataLoaderConfiguration(
                use_seedable_sampler=True, data_seed=1, use_stateful_dataloader="stateful" in how
            ),
        )
        model = small()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.2
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        rows: Any = batches(BATCHES)
        # a generator of its own: an iteration that is begun anew draws a seed from it
        data: Any = DataLoader(rows, batch_size=4, shuffle=True, generator=torch.Generator())
        watched: Any = DataLoader(rows[:4], batch_size=4, generator=torch.Generator())
        self.model, self.optimizer, self.data, self.watched, self.schedule = (
            self.accelerator.prepare(model, optimizer, data, watched, schedule)
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def batches_of(self, epoch: int) -> Iterator[Any]:
        skipped = max(0, self.counter.value - epoch * BATCHES)
        stateful = self.how.get("stateful")
        data: Any = self.data if stateful else skip_first_batches(self.data, skipped)
        data.set_epoch(epoch)
        return iter(list(data) if self.how.get("fetched") else data)

    def train(self, stop: int = STEPS, saves: int = 0) -> dict[int, float]:
        losses = {}
        for epoch in range(self.counter.value // BATCHES, EPOCHS):
            for batch in self.batches_of(epoch):
                self.model.train()
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
                if self.how.get("evaluates"):
                    self.model.eval()
                    with torch.no_grad():
                        assert all(self.model(**each).loss > 0 for each in self.watched)
                self.counter.value += 1
                losses[self.counter.value] = float(loss.detach())
                if self.counter.value == saves:
                    self.accelerator.save_state()
                if self.counter.value == stop:
                    break
            else:
                continue
            break
        if (checkpoints := checkpoints_of(self.model)) is not None:
            checkpoints.wait()
        return losses


def resumed(folder: Path, every: int | None = 2, named: bool = True, **how: bool) -> Loop:
    loop = Loop(folder, every, named, **how)
    loop.accelerator.load_state()
    return loop


@pytest.mark.parametrize(("stop", "how"), [(3, "fetched"), (11, "evaluates"), (7, "stateful")])
def test_a_loop_goes_on_from_memory(stop: int, how: str, tmp_path: Path) -> None:
    """Every second step is saved, once the next one begins; a script may name its folders."""
    if how == "stateful":
        pytest.importorskip("torchdata")
    named, options = how != "fetched", {how: True}
    whole = Loop(tmp_path / "other", None, named, **options).train()
    losses = Loop(tmp_path, 2, named, **options).train(stop)
    assert losses == {n: whole[n] for n in range(1, stop + 1)}
    loop = resumed(tmp_path, named=named, **options)
    assert loop.counter.value == loop.model.global_steps == stop - 1
    assert loop.train() == {n: whole[n] for n in range(stop, STEPS + 1)}
    if not named:
        with pytest.raises(ValueError, match="automatic checkpoint naming is disabled"):
            resumed(tmp_path / "none", named=False)


def test_the_newer_of_memory_and_disk_is_loaded(tmp_path: Path) -> None:
    """What a resumed loop saves has numbers of its own: a process counts from 0."""
    whole = Loop(tmp_path / "other", None, True).train()
    Loop(tmp_path, 2, True).train(5, saves=3)
    states = tmp_path / "run" / "checkpoints"
    kept = {path: path.stat().st_mtime_ns for path in states.rglob("*") if path.is_file()}
    loop = resumed(tmp_path)
    assert loop.counter.value == 4
    assert loop.train(7, saves=7) == {n: whole[n] for n in range(5, 8)}
    loop.accelerator.save_state()
    found = sorted(path.name for path in states.iterdir())
    assert found == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    assert all(path.stat().st_mtime_ns == changed for path, changed in kept.items())
    loop = resumed(tmp_path)
    assert loop.counter.value == 7
    assert loop.train() == {n: whole[n] for n in range(8, STEPS + 1)}
    loop.accelerator.load_state(str(states / "checkpoint_0"))
    assert loop.counter.value == 3


def test_memory_is_loaded_if_no_state_on_disk_is_whole(tmp_path: Path) -> None:
    whole = Loop(tmp_path / "other", None, True).train()
    Loop(tmp_path, 2, True).train(5, saves=3)
    for file in (tmp_path / "run").rglob("rank-*"):
        file.unlink()
    loop = resumed(tmp_path)
    assert loop.counter.value == 4
    assert loop.train(7) == {n: whole[n] for n in range(5, 8)}
    shutil.rmtree(tmp_path / "memory")
    with pytest.raises(CheckpointError, match="none of the 1 checkpoint"):
        resumed(tmp_path)


def test_a_loop_resumes_from_no_generation_of_another_project(tmp_path: Path) -> None:
    Loop(tmp_path, 2, True).train(3)
    other = Loop(tmp_path, 2, True, run="other")
    with pytest.raises(CheckpointError, match="other/checkpoints"):
        other.accelerator.load_state()
    assert other.model.global_steps == 0


def test_several_models_are_refused(tmp_path: Path) -> None:
    loop = Loop(tmp_path, 2, True)
    other = small()
    with pytest.raises(ConfigError, match="saves at a step of one model, and 2 models"):
        loop.accelerator.prepare(other, torch.optim.AdamW(other.parameters(), lr=1e-2))
