"""Saves beside the training in the Trainer, Accelerate and Lightning: what is old goes when the
new one is whole, what is pushed or loaded is whole.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import transformers
from huggingface_hub.utils import filter_repo_objects
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.strategies import deepspeed as deepspeed_strategy

from hf_zero.checkpoint import background_saves, find
from hf_zero.errors import CheckpointError
from hf_zero.integrations.checkpoint_folders import engine_checkpoint_error, trainer_folder_error
from hf_zero.integrations.lightning import ZeroStrategy
from tests.helpers.trainers import EVERY_STEP, SPOILED, logged, routed, weights
from tests.integrations.accelerate.test_checkpoints import Loop, names
from tests.integrations.lightning.test_strategy import Net, trainer_of
from tests.integrations.transformers.test_trainer_checkpoints import RANK, Tearing

pytestmark = pytest.mark.filterwarnings("ignore:::lightning")

BESIDE = {"checkpoint": {"async_save": True}}


class Gate:
    """Threads write their files while it is open."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.fails: list[str] = []  # parts of paths that cannot be written
        self.seconds = 0.0  # that each file takes


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, write = Gate(), background_saves.write_image

    def waiting(path: Path, *rest: Any) -> Any:
        assert gate.open.wait(60)
        time.sleep(gate.seconds)
        if any(part in str(path) for part in gate.fails):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, *rest)

    monkeypatch.setattr(background_saves, "write_image", waiting)
    yield gate
    gate.open.set()


class Held(transformers.TrainerCallback):
    """Keeps each save from being written until the Trainer is done with it and looks at what is
    there then.
    """

    def __init__(self, gate: Gate) -> None:
        self.gate, self.whole = gate, []
        self.run: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.deepspeed.wait_for_checkpoint()
        self.gate.open.clear()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        found = sorted(Path(args.output_dir).glob("checkpoint-*"))
        self.whole.append([folder.name for folder in found if not trainer_folder_error(folder)])
        self.gate.open.set()


def beside(folder: Path, stage: int = 3, *architecture: str, **changes: Any) -> Any:
    return routed("ours", stage, folder, *architecture, config=BESIDE, **changes)


def left(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.glob("*checkpoint-*"))


def test_the_limit_of_the_trainer_waits_for_the_new_one(
    gate: Gate, tmp_path: Path, heard: list[str]
) -> None:
    """Where that fails, at the last step, the old one stays."""
    watch = Held(gate)
    limit = {"save_total_limit": 1, "callbacks": [watch]}
    watch.run = beside(tmp_path, **EVERY_STEP, **limit)
    watch.run.train()
    assert watch.whole == [[], ["checkpoint-1"], ["checkpoint-2"], ["checkpoint-3"]]
    assert left(tmp_path) == ["checkpoint-4"]
    assert trainer_folder_error(tmp_path / "checkpoint-4") == ""
    assert not [text for text in heard if "damaged" in text]
    gate.fails.append("global_step5")
    watch.run = beside(tmp_path, **EVERY_STEP, **limit, max_steps=5)
    with pytest.raises(CheckpointError, match="Nothing was saved as 'global_step5'"):
        watch.run.train(resume_from_checkpoint=True)
    assert left(tmp_path) == ["checkpoint-4", "checkpoint-5"]
    assert trainer_folder_error(tmp_path / "checkpoint-4") == ""


def test_a_torn_best_one_is_no_reason_to_delete_the_last(tmp_path: Path, heard: list[str]) -> None:
    """With a metric and a limit of one the Trainer deletes all but the best at the end, loaded
    or not.
    """
    best = {**SPOILED, "metric_for_best_model": "loss", "save_total_limit": 1}
    torn = Tearing(["checkpoint-1"])
    routed("ours", 2, tmp_path, **EVERY_STEP, **best, callbacks=[torn], max_steps=2).train()
    assert trainer_folder_error(tmp_path / "checkpoint-2") == ""
    told = [text for text in heard if "the best checkpoint" in text]
    assert any("checkpoint-1 is not complete" in text for text in told)


class Hub:
    """The part of the hub's client that the Trainer calls: uploads are copies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create_repo(self, repo_id: str, **options: Any) -> Any:
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(
        self, *, folder_path: Any, path_in_repo: str = ".", ignore_patterns: Any = None, **how: Any
    ) -> Any:
        source = Path(folder_path)
        found = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
        names = [path.as_posix() for path in found]
        for name in filter_repo_objects(names, ignore_patterns=ignore_patterns):
            target = self.folder / path_in_repo / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, target)
        done: Any = SimpleNamespace(is_done=lambda: True, done=lambda: True)
        done.result = done.add_done_callback = lambda *given: None
        return done if how.get("run_as_future") else None


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    client = Hub(tmp_path / "hub")
    monkeypatch.setattr("transformers.trainer.hf_api", lambda *a, **k: client)
    monkeypatch.setattr("transformers.trainer.create_repo", client.create_repo, raising=False)
    return tmp_path / "hub"


def assert_loads(folder: Path, trained: dict[str, torch.Tensor]) -> None:
    """A model folder that loads as it is."""
    kind = transformers.AutoModelForMaskedLM
    loaded, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(value, trained[name]) for name, value in loaded.state_dict().items())


UPLOADED = {
    "checkpoint": ["last-checkpoint"],
    "all_checkpoints": [f"checkpoint-{step}" for step in (1, 2, 3, 4)],
}


@pytest.mark.parametrize("strategy", UPLOADED)
def test_what_is_pushed_is_whole(strategy: str, gate: Gate, hub: Path, tmp_path: Path) -> None:
    """A model folder, and checkpoints, which resume; nothing half done of ours."""
    gate.open.set()
    gate.seconds = 0.1
    pushed = {"push_to_hub": True, "hub_model_id": "someone/tiny", "hub_always_push": True}
    pushed |= {"hub_strategy": strategy, "save_total_limit": 1}
    run = beside(tmp_path / "run", **EVERY_STEP, **pushed)
    run.train()
    run.push_to_hub()
    assert sorted(item.name for item in hub.iterdir() if item.is_dir()) == UPLOADED[strategy]
    for name in UPLOADED[strategy]:
        assert trainer_folder_error(hub / name) == ""
    names = {path.relative_to(hub).as_posix() for path in hub.rglob("*") if path.is_file()}
    assert {"config.json", "model.safetensors", "training_args.bin", "README.md"} <= names
    ours = (find.RESERVED, "dropped")
    assert not [name for name in names if any(part in name for part in ours)]
    assert_loads(hub, weights(run))
    last = UPLOADED[strategy][-1]
    assert {f"{last}/latest", f"{last}/global_step4/{RANK}"} <= names
    if strategy == "checkpoint":
        resumed = routed("ours", 1, tmp_path / "again", max_steps=5)
        resumed.train(resume_from_checkpoint=str(hub / last))
        assert resumed.state.global_step == 5 and logged(resumed)[:4] == logged(run)


def test_a_save_that_is_asked_for_gathers_and_checkpoints_follow_the_key(
    gate: Gate,
    hub: Path,
    tmp_path: Path,
    heard_in_full: list[str],
) -> None:
    """Whatever stage3_gather_16bit_weights_on_model_save says, save_model and push_to_hub write
    weights; with false a checkpoint of the Trainer holds its shards alone.
    """
    gate.open.set()
    gate.seconds = 0.1
    stage = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}
    config = {**BESIDE, "zero_optimization": stage}
    given = {"push_to_hub": True, "hub_model_id": "someone/tiny"}
    given |= {"save_strategy": "steps", "save_steps": 4}
    run = routed("ours", 3, tmp_path / "run", config=config, **given)
    run.train()
    (folder,) = (tmp_path / "run").glob("checkpoint-*")
    assert engine_checkpoint_error(folder) == ""
    assert not [*folder.glob("model*.safetensors")]
    told = [line for line in heard_in_full if line.startswith(f"saved {folder}/")]
    assert len(told) == 1 and (folder / "config.json").is_file()  # one save, not two
    assert sum("checkpoints hold shards and no model.safetensors" in x for x in heard_in_full) == 1
    run.push_to_hub()
    run.save_model(str(tmp_path / "model"))
    for saved in (hub, tmp_path / "model"):
        assert_loads(saved, weights(run))


def test_the_limit_of_accelerate_waits_for_the_new_one(
    gate: Gate, tmp_path: Path, heard: list[str]
) -> None:
    loop = Loop(tmp_path, limit=1, **BESIDE)
    engine: Any = loop.model
    for number in range(3):
        loop.step()
        gate.open.clear()
        loop.accelerator.save_state()
        newest = range(max(number - 1, 0), number + 1)
        assert names(tmp_path) == [f"checkpoint_{each}" for each in newest]
        gate.open.set()
        engine.wait_for_checkpoint()
        assert names(tmp_path) == [f"checkpoint_{number}"]
    gate.fails.append("pytorch_model")
    gate.open.clear()
    loop.accelerator.save_state()
    gate.open.set()
    with pytest.raises(CheckpointError, match="Nothing was saved"):
        engine.wait_for_checkpoint()
    assert names(tmp_path) == ["checkpoint_2", "checkpoint_3"]
    assert not [text for text in heard if "damaged" in text]


class HeldFit(Callback):
    """Lets a save be written when the next batch begins, and sees what is there before."""

    def __init__(self, gate: Gate, folder: Path) -> None:
        self.gate, self.folder = gate, folder
        self.whole: list[list[str]] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.release(trainer)
        self.gate.open.clear()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.release(trainer)

    def release(self, trainer: Any) -> None:
        found = sorted(item for item in self.folder.glob("*.ckpt") if item.is_dir())
        self.whole.append([item.name for item in found if not engine_checkpoint_error(item)])
        self.gate.open.set()
        trainer.strategy.model.wait_for_checkpoint()


@pytest.mark.parametrize("kind", [ZeroStrategy, DeepSpeedStrategy])
def test_the_best_of_lightning_waits_for_the_new_one(
    kind: Any, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Lightning refuses its own where there is no CUDA, and knows CPU devices by no index.
    monkeypatch.setattr(deepspeed_strategy, "CUDAAccelerator", pl.accelerators.CPUAccelerator)
    monkeypatch.setattr(
        deepspeed_strategy, "_validate_device_index_selection", lambda devices: None
    )
    zero = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 3, **BESIDE}
    keeping = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=1)
    watch = HeldFit(gate, tmp_path)
    trainer = trainer_of(3, keeping, strategy=kind(config=zero))
    trainer.callbacks.append(watch)
    trainer.fit(Net())
    assert watch.whole == [[], [], ["epoch=0.ckpt"], ["epoch=1.ckpt"]]
    assert [item.name for item in tmp_path.iterdir()] == ["epoch=2.ckpt"]
    assert engine_checkpoint_error(tmp_path / "epoch=2.ckpt") == ""
