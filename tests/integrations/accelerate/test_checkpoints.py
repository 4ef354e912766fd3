"""States that Accelerate names itself: the last whole one is loaded, and old ones go when the
new one is whole, not before.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, StepLR

from hf_zero.errors import CheckpointError
from tests.helpers.cells import in_turn
from tests.helpers.plain_process import forget
from tests.helpers.trainers import EVERY_STEP, routed
from tests.integrations.accelerate.test_loop import accelerator_with, loader, prepared, small

RANK = "rank-00000-of-00001.safetensors"


class Counter:
    """Something of the script's own that is saved too."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Loop:
    def __init__(self, folder: Path, limit: int | None = None, **config: Any) -> None:
        settings = ProjectConfiguration(
            project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=limit
        )
        self.accelerator: Accelerator = accelerator_with(
            {"zero_optimization": {"stage": 2}, **config}, project_config=settings
        )
        model = small()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        self.model, self.optimizer, self.data, self.schedule = self.accelerator.prepare(
            model, optimizer, loader(8), schedule
        )
        self.model.eval()  # no dropout
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        self.batches = list(self.data)

    def step(self) -> float:
        loss = self.model(**self.batches[self.counter.value]).loss
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.counter.value += 1
        return float(loss.detach())


Saved = tuple[Path, list[float]]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """States after two, three and four steps, and what seven steps lose."""
    loop, losses = Loop(tmp_path), []
    for step in range(7):
        losses.append(loop.step())
        if step in (1, 2, 3):
            loop.accelerator.save_state()
    loop.accelerator.free_memory()
    forget()  # a job that resumes is another process
    return tmp_path, losses


def names(folder: Path) -> list[str]:
    return sorted(item.name for item in (folder / "checkpoints").iterdir())


def tear(way: str, folder: Path) -> None:
    if way == "in our save":
        for item in folder.iterdir():
            shutil.rmtree(item) if item.is_dir() else item.unlink()
        (folder / ".hf-zero-saving-pytorch_model").mkdir()
    elif way == "nothing after ours":
        for item in [*folder.glob("*.bin"), *folder.glob("*.pkl")]:
            item.unlink()
    elif way == "half a shard":
        os.truncate(folder / "pytorch_model" / RANK, 1000)
    else:
        os.truncate(folder / way, 10)


WAYS = {
    "in our save": "pytorch_model/manifest.json does not exist",
    "nothing after ours": "random_states_0.pkl is missing",
    "half a shard": RANK + " is cut short",
    "custom_checkpoint_0.pkl": "custom_checkpoint_0.pkl is cut short or damaged",
    "random_states_0.pkl": "random_states_0.pkl is cut short or damaged",
    "scheduler.bin": "scheduler.bin is cut short or damaged",
}


def test_the_last_whole_state_is_loaded(saved: Saved, tmp_path: Path, heard: list[str]) -> None:
    folder, losses = saved
    for way, said in WAYS.items():
        forget()
        shutil.copytree(folder, tmp_path / way)
        torn = tmp_path / way / "checkpoints" / "checkpoint_2"
        tear(way, torn)
        loop = Loop(tmp_path / way)
        loop.accelerator.load_state()
        assert loop.counter.value == 3, way
        assert [loop.step() for _ in range(4)] == losses[3:], way
        told = [text for text in heard if f"{torn} is not complete and is skipped" in text]
        assert told and said in told[0], heard
    # one that is named is the one that is loaded
    loop.accelerator.load_state(str(folder / "checkpoints" / "checkpoint_0"))
    assert loop.counter.value == 2


def test_a_state_of_another_name_is_loaded(saved: Saved) -> None:
    """As by Accelerate, which loads any name with a number."""
    folder, losses = saved
    states = folder / "checkpoints"
    (states / "checkpoint_1").rename(states / "epoch_0")
    for number in (0, 2):
        shutil.rmtree(states / f"checkpoint_{number}")
    loop = Loop(folder)
    loop.accelerator.load_state()
    assert loop.counter.value == 3
    assert [loop.step() for _ in range(4)] == losses[3:]


def test_a_job_that_was_killed_in_its_first_save(saved: Saved) -> None:
    """Its restart begins anew, and saves beside what is torn; the next one resumes."""
    folder, losses = saved
    for number in (1, 2):
        shutil.rmtree(folder / "checkpoints" / f"checkpoint_{number}")
    tear("in our save", folder / "checkpoints" / "checkpoint_0")
    for resumes in (False, True):
        forget()
        loop = Loop(folder)
        with nullcontext() if resumes else pytest.raises(CheckpointError, match="checkpoint_0"):
            loop.accelerator.load_state()
        assert (start := loop.counter.value) == 2 * resumes
        assert [loop.step() for _ in range(2)] == losses[start : start + 2]
        loop.accelerator.save_state()
    states = {path.name for path in (folder / "checkpoints").iterdir()}
    assert states == {f"checkpoint_{number}" for number in range(3)}


def test_files_of_the_script_beside_a_state_are_its_own(saved: Saved) -> None:
    folder, losses = saved
    (folder / "checkpoints" / "checkpoint_2" / "args.pkl").write_bytes(pickle.dumps({"lr": 0.1}))
    loop = Loop(folder)
    loop.accelerator.load_state()
    assert loop.counter.value == 4
    assert loop.step() == losses[4]


def test_folders_that_are_refused(saved: Saved, tmp_path: Path) -> None:
    """None, none that is whole, and a checkpoint of the Trainer."""
    for exists in (False, True):
        forget()
        states = tmp_path / "first" / "checkpoints"
        if exists:
            states.mkdir(parents=True)
        with pytest.raises(CheckpointError, match=str(states)):
            Loop(states.parent).accelerator.load_state()
    forget()
    for number in range(3):
        tear("half a shard", saved[0] / "checkpoints" / f"checkpoint_{number}")
    none = r"none of the 3 checkpoint\(s\) is complete \(checkpoint_2: .*cut short"
    with pytest.raises(CheckpointError, match=none):
        Loop(saved[0]).accelerator.load_state()
    forget()
    folder = tmp_path / "trainer" / "checkpoint-1"
    routed("ours", 2, folder.parent, **EVERY_STEP, max_steps=1).train()
    forget()
    with pytest.raises(CheckpointError, match=rf"{folder} is a checkpoint of the Trainer"):
        Loop(tmp_path).accelerator.load_state(str(folder))


def test_the_place_of_a_stateful_loader_after_other_ranks(tmp_path: Path, heard: list[str]) -> None:
    """A whole batch that ranks split is counted once for all of them."""
    pytest.importorskip("torchdata")
    for name, of, others, told in (
        ("same", {}, 1, 0), ("other", {}, 2, 1), ("whole", {"split_batches": True}, 2, 0),
        ("by rank 0", {"dispatch_batches": True}, 2, 0), ("no place", {}, 2, 0),
    ):  # fmt: skip
        forget()
        settings = DataLoaderConfiguration(use_stateful_dataloader=True, **of)
        ours = accelerator_with({}, dataloader_config=settings)
        _, _, data = prepared(ours)
        next(iter(data))
        folder = tmp_path / name
        ours.save_state(str(folder))
        if name == "no place":
            (folder / "dl_state_dict.bin").unlink()
        manifest = folder / "pytorch_model" / "manifest.json"
        written = json.loads(manifest.read_text())
        written["batch"]["readers"] = others
        del written["digest"]
        manifest.write_text(json.dumps(written))
        heard.clear()
        ours.load_state(str(folder))
        warned = [text for text in heard if f"{folder} was saved by {others} data" in text]
        assert len(warned) == told, (name, heard)


def linear(total: int) -> Callable[[Optimizer], LRScheduler]:
    return lambda optimizer: LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))


def constant(optimizer: Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 1.0)


def halving(optimizer: Optimizer) -> LRScheduler:
    return StepLR(optimizer, 2, 0.5)


ONCE = {"step_scheduler_with_optimizer": False}


@in_turn(
    "case",
    {
        # the schedules before and after, samples of a step before (4 now), further arguments,
        # rates of the steps 3 and 4 and whether a warning names the schedule
        "as many steps as all ranks have batches": (linear(20), linear(10), 4, {}, (0.8, 0.7), 0),
        "batches of a data set that stays": (linear(20), linear(20), 8, {}, (0.8, 0.75), 0),
        "steps of the ranks before": (linear(20), linear(20), 4, {}, (0.8, 0.75), 1),
        "another schedule": (linear(20), linear(7), 4, {}, None, 1),
        "the same at all steps": (constant, constant, 4, {}, (1.0, 1.0), 0),
        "numbers that are saved": (halving, halving, 4, {}, None, 1),
        "numbers of a data set that stays": (halving, halving, 8, {}, (0.25, 0.25), 0),
        "once a step": (linear(20), linear(20), 4, ONCE, None, 0),
    }.items(),
)  # fmt: skip
def test_the_schedule_after_a_state_of_two_ranks(
    case: tuple[str, Any], tmp_path: Path, heard: list[str]
) -> None:
    """A process that steps its schedule twice a step stands for the two."""
    name, (before, after, samples, arguments, rates, told) = case
    folder, seen = tmp_path / name, []

    def run(make: Callable[[Optimizer], LRScheduler]) -> tuple[Any, ...]:
        forget()
        accelerator = accelerator_with({"zero_optimization": {"stage": 1}}, **arguments)
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return accelerator, *accelerator.prepare(model, optimizer, loader(4), make(optimizer))

    accelerator, model, optimizer, data, schedule = run(before)
    for batch in [*data][:2]:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        schedule.step()
        schedule.step()
    accelerator.save_state(str(folder))
    manifest = folder / "pytorch_model" / "manifest.json"
    written = json.loads(manifest.read_text())
    assert written["batch"]["samples"] == 4
    written["batch"] |= {"readers": 2, "samples": samples}
    del written["digest"]
    manifest.write_text(json.dumps(written))
    accelerator, model, optimizer, data, schedule = run(after)
    heard.clear()
    accelerator.load_state(str(folder))
    for batch in [*data][2:]:
        seen.append(optimizer.param_groups[0]["lr"])
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        schedule.step()
    assert rates is None or seen == pytest.approx(rates), (name, seen)
    warned = [text for text in heard if "Accelerate steps the scheduler" in text]
    assert len(warned) == told and all("saved by 2 data-parallel" in text for text in warned), name


def test_old_states_go_when_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At limit 1 a job that is killed while it saves would be left with nothing."""
    loop = Loop(tmp_path, limit=1)
    seen: list[list[str]] = []
    engine: Any = loop.model
    save = engine.save_checkpoint

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(names(tmp_path))
        return save(*args, **kwargs)

    monkeypatch.setattr(engine, "save_checkpoint", watched)
    for _ in range(3):
        loop.step()
        loop.accelerator.save_state()
    pairs = [["checkpoint_0", "checkpoint_1"], ["checkpoint_1", "checkpoint_2"]]
    assert seen == [["checkpoint_0"], *pairs]
    assert names(tmp_path) == ["checkpoint_2"]
    assert sorted(item.name for item in tmp_path.iterdir()) == ["checkpoints"]
    assert loop.accelerator.project_configuration.total_limit == 1


def test_torn_states_are_not_counted_and_passed_over(saved: Saved, heard: list[str]) -> None:
    """For a complete state, Accelerate raises that the folder already exists."""
    folder, losses = saved
    tear("half a shard", folder / "checkpoints" / "checkpoint_2")
    (folder / "checkpoints" / "checkpoint_3").mkdir()
    loop = Loop(folder)
    loop.accelerator.load_state()
    loop.accelerator.project_configuration.iteration = 2
    loop.step()
    loop.accelerator.save_state()
    assert names(folder) == [f"checkpoint_{number}" for number in range(5)]
    assert loop.accelerator.save_iteration == 5
    for name, why in (("checkpoint_2", "is cut short"), ("checkpoint_3", "does not exist")):
        told = [text for text in heard if f"{name} is not complete and is left as it is" in text]
        assert told and why in told[0], heard
    loop.accelerator.project_configuration.iteration = 1
    with pytest.raises(ValueError, match="already exists"):
        loop.accelerator.save_state()
    loop.accelerator.load_state()
    assert [loop.step() for _ in range(3)] == losses[4:]
    loop.accelerator.project_configuration.total_limit = 2
    loop.accelerator.project_configuration.iteration = 5
    loop.accelerator.save_state()
    assert names(folder) == [f"checkpoint_{number}" for number in (2, 3, 4, 5)]
    said = "checkpoint_2 is damaged and is neither counted nor removed"
    assert any(said in text for text in heard)


@in_turn("first", [True, False])
def test_a_model_that_is_prepared_for_evaluation_is_saved_too(first: bool, tmp_path: Path) -> None:
    """Beside the engine and the script's own objects, in either order, and read back."""
    forget()
    accelerator = accelerator_with({"zero_optimization": {"stage": 2}})
    teacher, counter = torch.nn.BatchNorm1d(3), Counter()
    accelerator.register_for_checkpointing(counter)
    if first:
        accelerator.prepare_model(teacher, evaluation_mode=True)
    engine, *_ = prepared(accelerator)
    if not first:
        accelerator.prepare_model(teacher, evaluation_mode=True)
    models = list(accelerator._models)
    counter.value, weight = 3, engine.module.classifier.weight
    kept = weight.detach().clone()
    accelerator.save_state(str(tmp_path))
    with torch.no_grad():
        weight.zero_()
        teacher.weight.zero_()
        teacher.running_mean.add_(1.0)  # type: ignore[union-attr, operator]
    counter.value = 0
    accelerator.load_state(str(tmp_path))
    assert accelerator._models == models and counter.value == 3
    assert torch.equal(weight, kept)
    assert torch.equal(teacher.weight, torch.ones(3))
    assert torch.equal(teacher.running_mean, torch.zeros(3))  # type: ignore[arg-type]
    accelerator.free_memory()
