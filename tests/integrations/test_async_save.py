"""Saves beside the training in the Trainer, Accelerate and Lightning: what is old goes when the
new one is whole, what is pushed or loaded is whole.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import peft
import pytest
import torch
import transformers
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.strategies import deepspeed as deepspeed_strategy

from hf_zero.checkpoint import find, save_job
from hf_zero.errors import CheckpointError
from hf_zero.integrations.checkpoint_folders import engine_checkpoint_error, trainer_folder_error
from hf_zero.integrations.lightning import ZeroStrategy
from tests.helpers.trainers import BEST, EVERY_STEP, SPOILED, logged, model, routed, weights
from tests.integrations.accelerate.test_checkpoints import Loop, names
from tests.integrations.lightning.test_strategy import Net, trainer_of
from tests.integrations.transformers.test_trainer_checkpoints import assert_loads, hub  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore")

BESIDE = {"checkpoint": {"async_save": True}}


class Gate:
    """Threads write their files while it is open."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.fails: list[str] = []  # parts of paths that cannot be written
        self.seconds = 0.0  # that each file takes


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, write = Gate(), save_job.write_image

    def waiting(path: Path, *rest: Any) -> Any:
        assert gate.open.wait(60)
        time.sleep(gate.seconds)
        if any(part in str(path) for part in gate.fails):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, *rest)

    monkeypatch.setattr(save_job, "write_image", waiting)
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


def held(
    gate: Gate, folder: Path, stage: int = 3, **changes: Any
) -> tuple[transformers.Trainer, Held]:
    watch = Held(gate)
    watch.run = beside(folder, stage, **EVERY_STEP, callbacks=[watch], **changes)
    return watch.run, watch


def beside(folder: Path, stage: int = 3, *architecture: str, **changes: Any) -> Any:
    return routed("ours", stage, folder, *architecture, config=BESIDE, **changes)


def left(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.glob("*checkpoint-*"))


def test_the_limit_of_the_trainer_waits_for_the_new_one(
    gate: Gate, tmp_path: Path, heard: list[str]
) -> None:
    run, watch = held(gate, tmp_path, save_total_limit=1)
    run.train()
    assert watch.whole == [[], ["checkpoint-1"], ["checkpoint-2"], ["checkpoint-3"]]
    assert left(tmp_path) == ["checkpoint-4"]
    assert trainer_folder_error(tmp_path / "checkpoint-4") == ""
    assert not [text for text in heard if "damaged" in text]


def test_where_the_new_one_fails_the_old_one_stays(gate: Gate, tmp_path: Path) -> None:
    run, _ = held(gate, tmp_path, save_total_limit=1)
    gate.fails.append("global_step4")
    with pytest.raises(CheckpointError, match="Nothing was saved as 'global_step4'"):
        run.train()  # the last step: nothing but the end of the training can say so
    assert left(tmp_path) == ["checkpoint-3", "checkpoint-4"]
    assert trainer_folder_error(tmp_path / "checkpoint-3") == ""


def test_training_goes_on_from_what_was_saved_beside_it(gate: Gate, tmp_path: Path) -> None:
    gate.open.set()
    constant: dict[str, Any] = {"lr_scheduler_type": "constant"}
    whole = routed("ours", 2, tmp_path / "whole", max_steps=6, **constant)
    whole.train()
    beside(tmp_path / "run", **EVERY_STEP, **constant, save_total_limit=1).train()
    resumed = beside(tmp_path / "run", 2, max_steps=6, **constant)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed) == pytest.approx(logged(whole), rel=1e-6)


@pytest.mark.parametrize("better", [True, False], ids=["last is the best", "first is the best"])
def test_the_best_model_is_loaded_though_it_is_still_being_written(
    better: bool, gate: Gate, tmp_path: Path, heard: list[str]
) -> None:
    gate.open.set()
    gate.seconds = 0.3
    best = {**BEST, "learning_rate": 1e-3 if better else 0.5}
    run = beside(tmp_path, **EVERY_STEP, **best, save_total_limit=1)
    run.train()
    losses = logged(run, "eval_loss")
    assert min(losses) == losses[-1 if better else 0]
    assert left(tmp_path) == [f"checkpoint-{4 if better else 1}"]
    assert not [text for text in heard if "not whole" in text]
    assert run.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-6)


def test_the_best_adapters_are_loaded(gate: Gate, tmp_path: Path) -> None:
    gate.open.set()
    gate.seconds = 0.1
    lora = peft.LoraConfig(
        r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    changes: dict[str, Any] = {**EVERY_STEP, **BEST, "learning_rate": 5.0, "save_total_limit": 1}
    changes["model"] = peft.get_peft_model(model("gpt2"), lora)
    run = beside(tmp_path, 3, "gpt2", **changes)
    run.train()
    losses = logged(run, "eval_loss")
    assert min(losses) == losses[0] < losses[-1] and left(tmp_path) == ["checkpoint-1"]
    assert run.evaluate()["eval_loss"] == pytest.approx(losses[0], rel=1e-6)
    loaded = peft.PeftModel.from_pretrained(model("gpt2"), str(tmp_path / "checkpoint-1"))
    expected = {name: value for name, value in weights(run).items() if "lora" in name}
    assert expected
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in expected.items())


class Tearing(transformers.TrainerCallback):
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for shard in (Path(args.output_dir) / "checkpoint-1").rglob("rank-*"):
            os.truncate(shard, 100)


def test_a_torn_best_one_is_no_reason_to_delete_the_last(tmp_path: Path, heard: list[str]) -> None:
    """With a metric and a limit of one the Trainer deletes all but the best at the end, loaded
    or not.
    """
    best = {**SPOILED, "metric_for_best_model": "loss", "save_total_limit": 1}
    routed("ours", 2, tmp_path, **EVERY_STEP, **best, callbacks=[Tearing()]).train()
    assert trainer_folder_error(tmp_path / "checkpoint-4") == ""
    told = [text for text in heard if "the best checkpoint" in text]
    assert any("checkpoint-1 is not whole" in text for text in told)


PUSHED = {"push_to_hub": True, "hub_model_id": "someone/tiny", "hub_always_push": True}
UPLOADED = {
    "every_save": [],
    "end": [],
    "checkpoint": ["last-checkpoint"],
    "all_checkpoints": [f"checkpoint-{step}" for step in (1, 2, 3, 4)],
}


@pytest.mark.parametrize("strategy", UPLOADED)
def test_what_is_pushed_is_whole(strategy: str, gate: Gate, hub: Path, tmp_path: Path) -> None:  # noqa: F811
    gate.open.set()
    gate.seconds = 0.3
    pushed = {**EVERY_STEP, **PUSHED, "hub_strategy": strategy, "save_total_limit": 1}
    run = beside(tmp_path / "run", **pushed)
    run.train()
    if strategy == "end":
        assert not hub.exists()
        run.push_to_hub()
    assert sorted(item.name for item in hub.iterdir() if item.is_dir()) == UPLOADED[strategy]
    for name in UPLOADED[strategy]:
        assert trainer_folder_error(hub / name) == ""
    assert not [path for path in hub.rglob("*") if path.name.startswith(find.RESERVED)]
    assert_loads(hub, weights(run))


def test_a_save_that_is_asked_for_gathers_and_checkpoints_follow_the_key(
    gate: Gate,
    hub: Path,  # noqa: F811
    tmp_path: Path,
    heard_in_full: list[str],
) -> None:
    """Whatever stage3_gather_16bit_weights_on_model_save says, save_model and push_to_hub write
    weights; with false a checkpoint of the Trainer holds its shards alone.
    """
    gate.open.set()
    gate.seconds = 0.3
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


ZERO = {"zero_optimization": {"stage": 2}, **BESIDE}
STRATEGIES: dict[str, Any] = {
    "ours": lambda: ZeroStrategy(config=ZERO),
    "Lightning's own": lambda: DeepSpeedStrategy(
        config={**ZERO, "train_micro_batch_size_per_gpu": 3}
    ),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_best_of_lightning_waits_for_the_new_one(
    strategy: str, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Lightning refuses it where there is no CUDA, and knows CPU devices by no index.
    monkeypatch.setattr(deepspeed_strategy, "CUDAAccelerator", pl.accelerators.CPUAccelerator)
    monkeypatch.setattr(
        deepspeed_strategy, "_validate_device_index_selection", lambda devices: None
    )
    keeping = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=1)
    watch = HeldFit(gate, tmp_path)
    trainer = trainer_of(3, keeping, strategy=STRATEGIES[strategy]())
    trainer.callbacks.append(watch)
    trainer.fit(Net())
    assert watch.whole == [[], [], ["epoch=0.ckpt"], ["epoch=1.ckpt"]]
    assert [item.name for item in tmp_path.iterdir()] == ["epoch=2.ckpt"]
    assert engine_checkpoint_error(tmp_path / "epoch=2.ckpt") == ""
