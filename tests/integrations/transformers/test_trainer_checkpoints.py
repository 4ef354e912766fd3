"""Trainer folders that were written in pieces and cut off: a run resumes from, ends with, keeps
and pushes those that are whole.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import transformers

import hf_zero
from hf_zero.checkpoint import find
from hf_zero.checkpoint.manifest import MANIFEST_NAME
from hf_zero.checkpoint.manifest_reading import read_manifest
from hf_zero.checkpoint.memory import saving
from hf_zero.checkpoint.memory.folders import is_in_use
from hf_zero.errors import CheckpointError
from hf_zero.integrations.checkpoint_folders import trainer_folder_error
from hf_zero.integrations.transformers import trainer, trainer_checkpoints
from hf_zero.integrations.transformers.trainer_config import SAVE_WEIGHTS
from tests.helpers.plain_process import forget
from tests.helpers.trainers import BEST, EVERY_STEP, began_at, logged, routed, rows, weights
from tests.integrations.accelerate.test_loop import accelerator_with, loader, small

RANK = "rank-00000-of-00001.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Four steps with a checkpoint after each, and their losses."""
    folder = tmp_path_factory.mktemp("whole")
    forget()
    run = routed("ours", 2, folder, **EVERY_STEP)
    run.train()
    forget()
    return folder, logged(run)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def step_of(folder: Path) -> Path:
    """Our checkpoint in that of the Trainer."""
    return folder / f"global_step{folder.name.rpartition('-')[2]}"


def only_weights(folder: Path) -> None:
    for item in [step_of(folder), *folder.iterdir()]:
        if item.name != "model.safetensors":
            shutil.rmtree(item) if item.is_dir() else item.unlink(missing_ok=True)


def in_our_save(folder: Path) -> None:
    ours = step_of(folder)
    ours.rename(folder / f".hf-zero-saving-{ours.name}")
    for name in ("latest", "trainer_state.json", "scheduler.pt", "rng_state.pth"):
        (folder / name).unlink()


# How a job that is killed in the middle of its save, or a machine that loses power, leaves a
# folder, and what is said of it.
NO_STATE = "trainer_state.json is missing"
INCOMPLETE = "checkpoint-is-incomplete.txt"
WAYS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "only weights": (
        only_weights,
        f"whole weights and nothing that training resumes from|{NO_STATE}",
    ),
    "in our save": (in_our_save, NO_STATE),
    "ours without latest": (lambda f: (f / "latest").unlink(), "latest is missing"),
    "half a state of the Trainer": (
        lambda f: cut(f / "trainer_state.json"),
        "trainer_state.json is cut short or damaged",
    ),
    "an empty schedule": (
        lambda f: (f / "scheduler.pt").write_bytes(b""),
        "scheduler.pt is cut short or damaged",
    ),
    "half a random state": (
        lambda f: cut(f / "rng_state.pth"),
        "rng_state.pth is cut short or damaged",
    ),
    "a shard cut short": (lambda f: cut(step_of(f) / RANK), RANK + " is cut short"),
    "a shard that is gone": (lambda f: (step_of(f) / RANK).unlink(), RANK + " is missing"),
    "told to end": (
        lambda f: (f / INCOMPLETE).write_text(""),
        f"{INCOMPLETE} says that its save has not ended",
    ),
}


def tear(way: str, *folders: Path) -> None:
    for folder in folders:
        WAYS[way][0](folder)


def copied(whole: tuple[Path, list[float]], tmp_path: Path) -> Path:
    shutil.copytree(whole[0], tmp_path / "run")
    return tmp_path / "run"


def test_torn_ones_are_named(whole: Any, tmp_path: Path) -> None:
    """With what is wrong in them."""
    for way, (_, said) in WAYS.items():
        folder = tmp_path / way / "checkpoint-3"
        shutil.copytree(whole[0] / folder.name, folder)
        assert trainer_folder_error(folder) == ""
        tear(way, folder)
        found = trainer_folder_error(folder)
        assert any(part in found for part in said.split("|")), (way, found)


def test_the_last_whole_one_is_resumed(whole: Any, tmp_path: Path, heard: list[str]) -> None:
    folder = copied(whole, tmp_path)
    shutil.rmtree(folder / "checkpoint-4")
    tear("a shard cut short", folder / "checkpoint-3")
    run = routed("ours", 2, folder, **EVERY_STEP)
    run.train(resume_from_checkpoint=True)
    assert logged(run) == whole[1]
    assert sum("checkpoint-3 is not complete and is skipped" in text for text in heard) == 1
    # The run has come past the torn one and written it anew.
    assert not [text for text in heard if "checkpoint-2 is not complete" in text]
    assert find.is_checkpoint(find.locate(folder / "checkpoint-3"))


def test_true_and_false_as_text(
    whole: Any, tmp_path: Path, heard_in_full: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--resume_from_checkpoint True`` of a command line is text: the last checkpoint, or a start
    from scratch. Missing random states are told.
    """
    folder = copied(whole, tmp_path)
    shutil.rmtree(folder / "checkpoint-4")
    (folder / "checkpoint-3" / "rng_state.pth").unlink()
    monkeypatch.chdir(tmp_path)
    resuming = f"resuming from the last checkpoint in {folder}"
    for text, said in (("True", resuming), ("false", "not resuming")):
        run = routed("ours", 2, folder)
        run.train(resume_from_checkpoint=text)
        assert logged(run) == whole[1]
        assert run.state.global_step == 4 and len(run.state.log_history) == 5  # with the summary
        assert any(f"{text!r} is text" in line and said in line for line in heard_in_full)
        forget()
    missing = "has no rng_state.pth: the random numbers of this rank do not go on"
    assert sum(missing in text for text in heard_in_full) == 1


OWN_SHARDS: dict[str, Any] = {"accelerator_config": {"dispatch_batches": False}}
# changes of the run, rows beyond whole steps, shards of a stream, the setting that is named
OTHER_ROWS: list[tuple[dict[str, Any], int, int, str]] = [
    ({}, 8, 0, ""),
    ({}, 4, 0, "fills the last step"),
    ({"accelerator_config": {"even_batches": False}}, 4, 0, ""),
    ({"train_sampling_strategy": "batch_rebalance"}, 0, 0, ""),
    ({"train_sampling_strategy": "group_by_length"}, 0, 0, "'group_by_length'"),
    ({"dataloader_drop_last": True}, 0, 0, ""),
    ({"dataloader_drop_last": True}, 4, 0, "dataloader_drop_last"),
    (OWN_SHARDS, 0, 4, "dispatch_batches=False"),
    (OWN_SHARDS, 0, 1, ""),
    ({}, 0, 4, ""),
]


def test_settings_with_other_rows_on_other_ranks_are_named(
    whole: Any, tmp_path: Path, heard: list[str]
) -> None:
    """One rank resumes what two have saved, with as many rows a step."""
    path = find.locate(copied(whole, tmp_path) / "checkpoint-4") / MANIFEST_NAME
    manifest = read_manifest(path)
    batch = {**manifest.batch, "readers": 2, "samples": 2 * manifest.batch["samples"]}
    path.write_bytes(replace(manifest, batch=batch).dumps())
    for changes, more, shards, named in OTHER_ROWS:
        data: Any = rows(count=len(rows()) + more)
        if shards:
            data = datasets.Dataset.from_list(data).to_iterable_dataset(num_shards=shards)
        run = routed("ours", 2, tmp_path / "run", train_dataset=data, **changes)
        run.train(resume_from_checkpoint=True)
        assert run.args.gradient_accumulation_steps == 2 * batch["micro_batches"]
        said = [text for text in heard if "other rows" in text]
        assert len(said) == bool(named) and all(named in text for text in said), (changes, heard)
        heard.clear()
        forget()


def refused(folder: Path, resume: Any, match: str, stage: int = 2) -> str:
    run = routed("ours", stage, folder, max_steps=6)
    with pytest.raises(CheckpointError, match=match) as raised:
        run.train(resume_from_checkpoint=resume)
    forget()
    return str(raised.value)


def test_folders_that_are_not_whole_or_not_there_are_refused(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And rank 0, which looks alone, raises on every rank what storage fails with."""
    folder = copied(whole, tmp_path)
    absent = r"checkpoint-9': there is no such folder.*holds checkpoint-4, checkpoint-3"
    refused(folder, str(folder / "checkpoint-9"), absent)
    tear("a shard cut short", folder / "checkpoint-3")
    tear("half a state of the Trainer", folder / "checkpoint-4")
    other = r"checkpoint-3 is not complete: .*cut short.*checkpoint-2 is complete"
    refused(folder, str(folder / "checkpoint-3"), other)
    tear("a shard cut short", *(folder / f"checkpoint-{step}" for step in (1, 2)))
    none = r"none of the 4 checkpoint\(s\) is complete \(checkpoint-4: .*checkpoint-1: .*cut short"
    refused(folder, True, none)
    rest = rf"is not complete: .*\. No other checkpoint in {folder} is complete$"
    refused(folder, str(folder / "checkpoint-3"), rest)
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        routed("ours", 2, tmp_path / "empty").train(resume_from_checkpoint=True)
    forget()

    def failing(parent: Path, name: str) -> list[Path]:
        raise OSError(5, "Input/output error", str(parent))

    seam = "hf_zero.integrations.transformers.trainer_resume.numbered_folders"
    monkeypatch.setattr(seam, failing)
    refused(folder, True, "run: Input/output error; check the storage")


def test_what_is_no_checkpoint_of_this_trainer_is_called_by_its_name(tmp_path: Path) -> None:
    """A state of Accelerate, checkpoints of the model alone, and those of other Trainers."""
    state = tmp_path / "states" / "checkpoint-1"
    accelerator = accelerator_with({"zero_optimization": {"stage": 2}})
    net = small()
    accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loader(8))
    accelerator.save_state(str(state))
    forget()
    said = rf"{state} is a state that accelerator\.save_state wrote.*accelerator\.load_state"
    for named in (True, False):
        told = refused(state.parent, str(state) if named else True, said)
        assert named is ("complete" not in told) and f"convert-checkpoint {state} MODEL" in told
    hf_zero.convert_checkpoint(state, tmp_path / "MODEL")
    type(net).from_pretrained(tmp_path / "MODEL")

    without = {"zero_optimization": {"stage": 3, SAVE_WEIGHTS: False}}
    for config in ({}, without):
        folder = tmp_path / f"weights {len(config)}"
        alone = {**EVERY_STEP, "save_only_model": True, "max_steps": 1}
        run = routed("ours", 3, folder, config=config, **alone)
        run.train()
        forget()
        only = r"checkpoint-1 holds the model alone, .*save_only_model"
        for resume in (True, str(folder / "checkpoint-1")):
            told = refused(folder, resume, only, 3)
        assert "complete" not in told
        loaded = type(run.model).from_pretrained(folder / "checkpoint-1").state_dict()
        assert all(torch.equal(value, loaded[name]) for name, value in weights(run).items())
    (folder / "checkpoint-1" / "model.safetensors").rename(
        folder / "checkpoint-1" / "adapter_model.safetensors"
    )
    refused(folder, True, only, 3)

    sharded = ["pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"]
    converted = "under FSDP, .* weights, which hf-zero convert-checkpoint .* MODEL writes, with"
    for at, (says, files) in enumerate(
        {
            "without ZeRO, .* weights with from_pre": ["model.safetensors", "optimizer.pt"],
            converted: sharded,
        }.items()
    ):
        folder = tmp_path / str(at) / "checkpoint-1"
        for name in ("trainer_state.json", "scheduler.pt", *files):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text('{"global_step": 1}')
        told = refused(folder.parent, str(folder), f"is a checkpoint of a Trainer {says}")
        assert "complete" not in told


def kept(folder: Path) -> list[str]:
    starts = ("checkpoint", "_", ".")
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(starts))


def test_the_limit_counts_whole_ones(whole: Any, tmp_path: Path, heard: list[str]) -> None:
    """Two of four are whole when the fifth comes; the newer of them and the fifth stay."""
    folder = copied(whole, tmp_path)
    (folder / "_hf-zero-dropped-checkpoint-0").mkdir()  # of a removal that was cut off
    tear("a shard cut short", folder / "checkpoint-3")
    tear("half a state of the Trainer", folder / "checkpoint-4")
    for step in (1, 2):  # copied in whatever order
        os.utime(folder / f"checkpoint-{step}", (step, step))
    run = routed("ours", 2, folder, max_steps=5, **EVERY_STEP, save_total_limit=2)
    run.train(resume_from_checkpoint=str(whole[0] / "checkpoint-4"))
    assert kept(folder) == ["checkpoint-2", "checkpoint-3", "checkpoint-4", "checkpoint-5"]
    for step in (3, 4):
        said = f"checkpoint-{step} is damaged and is neither counted nor removed"
        assert any(said in text for text in heard)


@pytest.mark.parametrize(
    ("best", "left"),
    [({}, ["checkpoint-2", "checkpoint-3"]), (BEST, ["checkpoint-1", "checkpoint-3"])],
)
def test_the_limit_of_the_trainer(best: Any, left: list[str], tmp_path: Path) -> None:
    """The newest checkpoints stay, and the best beside the newest, as without hf-zero."""
    limit = {"save_total_limit": 2, "max_steps": 3}
    routed("stock", 3, tmp_path, **EVERY_STEP, **best, **limit).train()
    assert kept(tmp_path) == left


class Tearing(transformers.TrainerCallback):
    """Damages checkpoints of a run when its last step is done."""

    def __init__(self, chosen: list[str]) -> None:
        self.chosen = chosen

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == state.max_steps:
            folder = Path(args.output_dir)
            tear("a shard cut short", *(folder / name for name in self.chosen))


@pytest.mark.parametrize("torn", [1, 3])
def test_the_best_whole_model_is_loaded_at_the_end(
    torn: int, tmp_path: Path, heard: list[str]
) -> None:
    """With a learning rate that spoils the model: the first evaluation is the best."""
    names = [f"checkpoint-{step}" for step in range(1, torn + 1)]
    tearing = {"callbacks": [Tearing(names)], "max_steps": 3}
    run = routed("ours", 2, tmp_path, **EVERY_STEP, **BEST, **tearing)
    run.train()
    losses = logged(run, "eval_loss")
    assert min(losses) == losses[0]
    left = {step: loss for step, loss in enumerate(losses, 1) if step > torn}
    if left:
        chosen = min(left, key=lambda step: left[step])
        assert run.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{chosen}")
        assert run.state.best_metric == left[chosen]
        told = [text for text in heard if "the best checkpoint" in text]
        assert any("checkpoint-1 is not complete" in text for text in told)
    else:
        stays = "no checkpoint with a metric is complete: the model stays as training has left it"
        assert any(stays in text for text in heard)
    expected = left[chosen] if left else losses[-1]
    assert run.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_a_metric_that_is_no_number_is_not_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the Trainer, where no comparison with NaN holds."""
    scores = {1: 2.0, 2: float("nan"), 3: 1.0, 4: float("nan")}
    for step in scores:
        (tmp_path / f"checkpoint-{step}").mkdir()
    best = tmp_path / "checkpoint-3"
    damage: dict[Path, str] = {best: "cut short"}
    monkeypatch.setattr(trainer_checkpoints, "engine_checkpoint_error", lambda f: damage.get(f, ""))
    history = [{"step": step, "eval_loss": loss} for step, loss in scores.items()]
    for order in (history, history[::-1]):
        state = SimpleNamespace(log_history=order, best_metric=1.0)
        args = SimpleNamespace(metric_for_best_model="loss", greater_is_better=False)
        run: Any = SimpleNamespace(state=state, args=args)
        found = trainer_checkpoints._best_complete(run, best)
        assert found == (str(tmp_path / "checkpoint-1"), 2.0)


def test_a_folder_whose_name_looks_like_a_pattern(tmp_path: Path) -> None:
    """Its best checkpoint is loaded at the end, and a run resumes from it."""
    runs = []
    for name in ("plain", "lr[1e-3]*"):
        forget()
        folder = tmp_path / name
        run = routed("ours", 2, folder, **EVERY_STEP, **BEST, max_steps=3)
        run.train()
        assert run.state.best_model_checkpoint == str(folder / "checkpoint-1")
        best = weights(run)
        forget()
        again = routed("ours", 2, folder, max_steps=4)
        again.train(resume_from_checkpoint=True)
        assert began_at(again) == 3
        runs.append((best, weights(again)))
    for expected, found in zip(*runs):
        assert all(torch.equal(expected[name], found[name]) for name in expected)
    (empty := tmp_path / "lr[1e-3]").mkdir()
    with pytest.raises(ValueError, match=re.escape(str(empty))):
        transformers.trainer.deepspeed_load_checkpoint(again.model_wrapped, str(empty))


class Killed(transformers.TrainerCallback):
    """The end of a job after ``steps`` steps, in the next one."""

    def __init__(self, steps: int = 2) -> None:
        self.steps = steps

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == self.steps:
            raise KeyboardInterrupt


def test_a_run_that_saves_models_alone_resumes_from_memory(
    whole: tuple[Path, list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No command removes the generation before its load."""
    memory = {"every": 1, "folder": str(tmp_path / "memory"), "job": "job"}
    keys = {"config": {"checkpoint": {"memory": memory}}, "save_only_model": True}
    with pytest.raises(KeyboardInterrupt):
        routed("ours", 2, tmp_path, callbacks=[Killed()], **keys).train()
    forget()
    saving._claimed.clear()  # the process is gone
    gc.collect()
    run, keep, states = routed("ours", 2, tmp_path, **keys), trainer.keep_given_optimizer, []

    def noted(self: Any) -> None:
        states.extend(map(is_in_use, (tmp_path / "memory").iterdir()))
        keep(self)

    monkeypatch.setattr(trainer, "keep_given_optimizer", noted)
    run.train(resume_from_checkpoint=True)
    assert began_at(run) == 2
    assert states == [True]
    assert run.args.save_only_model
    assert logged(run) == whole[1]


def test_a_run_resumes_from_no_generation_of_another_output_dir(tmp_path: Path) -> None:
    memory = {"every": 1, "folder": str(tmp_path / "memory"), "job": "job"}
    keys = {"config": {"checkpoint": {"memory": memory}}}
    with pytest.raises(KeyboardInterrupt):
        routed("ours", 2, tmp_path / "one", callbacks=[Killed()], **keys).train()
    forget()
    saving._claimed.clear()  # the process is gone
    with pytest.raises(ValueError, match="No valid checkpoint"):
        routed("ours", 2, tmp_path / "other", **keys).train(resume_from_checkpoint=True)


def test_a_run_resumes_from_memory_if_no_checkpoint_on_disk_is_whole(
    whole: tuple[Path, list[float]], tmp_path: Path
) -> None:
    memory = {"every": 1, "folder": str(tmp_path / "memory"), "job": "job"}
    keys = {"config": {"checkpoint": {"memory": memory}}, **EVERY_STEP}
    with pytest.raises(KeyboardInterrupt):
        routed("ours", 2, tmp_path, callbacks=[Killed()], **keys).train()
    for checkpoint in tmp_path.glob("checkpoint-*"):
        cut(step_of(checkpoint) / RANK)
    forget()
    saving._claimed.clear()  # the process is gone
    run = routed("ours", 2, tmp_path, **keys, callbacks=[Killed(3)])
    with pytest.raises(KeyboardInterrupt):
        run.train(resume_from_checkpoint=True)
    assert began_at(run) == 2
    assert logged(run) == whole[1][:3]
    forget()
    saving._claimed.clear()
    shutil.rmtree(tmp_path / "memory")
    shutil.rmtree(tmp_path / "checkpoint-3", ignore_errors=True)
    with pytest.raises(CheckpointError, match="is complete"):
        routed("ours", 2, tmp_path, **keys).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("best", [3, 6])
def test_saves_into_memory_leave_the_best_checkpoint_to_saves_into_folders(
    best: int, tmp_path: Path, heard: list[str]
) -> None:
    """Of six steps, of which every second one is saved into a folder."""
    told = []
    for memory in (False, True):
        forget()
        folder, scores = (
            tmp_path / str(memory),
            iter([1, 2, *(float(s == best) * 3 for s in range(3, 7))]),
        )
        keys = {"memory": {"every": 1, "folder": str(tmp_path / "memory")}} if memory else {}
        run = routed(
            "ours", 2, folder, config={"checkpoint": keys}, max_steps=6, save_strategy="steps",
            save_steps=2, save_total_limit=2, eval_strategy="steps", eval_steps=1,
            metric_for_best_model="score", load_best_model_at_end=True,
            compute_metrics=lambda predicted, scores=scores: {"score": next(scores)},
        )  # fmt: skip
        run.train()
        left = {name: str(folder / name) for name in kept(folder)}
        told.append(([*left], run.state.best_model_checkpoint in left.values()))
    names = ["checkpoint-2", "checkpoint-6"] if best == 3 else ["checkpoint-4", "checkpoint-6"]
    assert told == [(names, True)] * 2
    assert not [text for text in heard if "complete:" in text]
