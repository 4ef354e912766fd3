"""Trainer folders that were written in pieces and cut off: a run resumes from, ends with, keeps
and pushes those that are whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import hf_zero
from hf_zero.checkpoint import find
from hf_zero.errors import CheckpointError
from tests.helpers.plain_process import forget
from tests.helpers.trainers import BEST, EVERY_STEP, SPOILED, logged, routed, weights
from tests.integrations.accelerate.test_loop import accelerator_with, loader, small

pytestmark = pytest.mark.usefixtures("plain_process")

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
    "no state of the Trainer": (lambda f: (f / "trainer_state.json").unlink(), NO_STATE),
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


def tear(way: str, folder: Path) -> None:
    WAYS[way][0](folder)


def copied(whole: tuple[Path, list[float]], tmp_path: Path) -> Path:
    shutil.copytree(whole[0], tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("way", WAYS)
def test_the_last_whole_one_is_resumed_and_torn_ones_are_named(
    way: str, whole: Any, tmp_path: Path, heard: list[str]
) -> None:
    folder = copied(whole, tmp_path)
    shutil.rmtree(folder / "checkpoint-4")
    tear(way, folder / "checkpoint-3")
    run = routed("ours", 2, folder, **EVERY_STEP)
    run.train(resume_from_checkpoint=True)
    assert logged(run) == whole[1]
    told = [text for text in heard if "checkpoint-3 is not whole and is skipped" in text]
    assert len(told) == 1 and any(part in told[0] for part in WAYS[way][1].split("|")), heard
    # The run has come past the torn one and written it anew.
    assert not [text for text in heard if "checkpoint-2 is not whole" in text]
    assert find.is_checkpoint(find.locate(folder / "checkpoint-3"))


def test_true_as_text_means_the_last_checkpoint(
    whole: Any, tmp_path: Path, heard_in_full: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--resume_from_checkpoint True`` of a command line is text."""
    folder = copied(whole, tmp_path)
    shutil.rmtree(folder / "checkpoint-4")
    monkeypatch.chdir(tmp_path)
    run = routed("ours", 2, folder, **EVERY_STEP)
    run.train(resume_from_checkpoint="True")
    assert logged(run) == whole[1]
    said = f"resuming from the last checkpoint in {folder}"
    assert any("'True' is text" in line and said in line for line in heard_in_full)


def test_false_as_text_means_a_start_from_scratch(
    whole: Any, tmp_path: Path, heard_in_full: list[str]
) -> None:
    """``--resume_from_checkpoint False`` of a command line is text."""
    folder = copied(whole, tmp_path)
    for text in ("False", "false"):
        run = routed("ours", 2, folder)
        run.train(resume_from_checkpoint=text)
        assert logged(run) == whole[1]
        assert run.state.global_step == 4 and len(run.state.log_history) == 5  # with the summary
        assert any(f"{text!r} is text" in line and "not resuming" in line for line in heard_in_full)
        forget()


def test_if_none_is_whole_all_are_named(whole: Any, tmp_path: Path) -> None:
    folder = copied(whole, tmp_path)
    for step in (1, 2, 3, 4):
        tear("a shard cut short", folder / f"checkpoint-{step}")
    run = routed("ours", 2, folder, **EVERY_STEP)
    with pytest.raises(
        CheckpointError,
        match=r"none of the 4 checkpoint\(s\) is whole \(checkpoint-4: .*cut "
        r"short.*checkpoint-1: .*start from scratch",
    ):
        run.train(resume_from_checkpoint=True)


def test_without_any_the_trainer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        routed("ours", 2, tmp_path).train(resume_from_checkpoint=True)


def test_a_folder_that_is_not_there_is_refused_with_those_that_are(
    whole: Any, tmp_path: Path
) -> None:
    folder = copied(whole, tmp_path)
    run = routed("ours", 2, folder)
    with pytest.raises(
        CheckpointError,
        match=r"checkpoint-9': there is no such folder.*holds checkpoint-4, checkpoint-3",
    ):
        run.train(resume_from_checkpoint=str(folder / "checkpoint-9"))


def test_a_torn_one_asked_for_by_name_is_refused_with_the_whole_one(
    whole: Any, tmp_path: Path
) -> None:
    folder = copied(whole, tmp_path)
    tear("a shard cut short", folder / "checkpoint-3")
    tear("half a state of the Trainer", folder / "checkpoint-4")
    run = routed("ours", 2, folder)
    with pytest.raises(
        CheckpointError, match=r"checkpoint-3 is not whole: .*cut short.*checkpoint-2 is whole"
    ):
        run.train(resume_from_checkpoint=str(folder / "checkpoint-3"))


@pytest.mark.parametrize("named", [True, False])
def test_a_state_of_accelerate_is_called_one(named: bool, tmp_path: Path) -> None:
    state = tmp_path / "checkpoint-1"
    accelerator = accelerator_with({"zero_optimization": {"stage": 2}})
    net = small()
    accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loader(8))
    accelerator.save_state(str(state))
    forget()
    run = routed("ours", 2, tmp_path)
    with pytest.raises(
        CheckpointError,
        match=rf"{state} is a state that accelerator\.save_state wrote, not .* load it with "
        rf"accelerator\.load_state, or run hf-zero convert-checkpoint {state} MODEL",
    ) as raised:
        run.train(resume_from_checkpoint=str(state) if named else True)
    assert named is ("whole" not in str(raised.value))
    hf_zero.convert_checkpoint(state, tmp_path / "MODEL")
    type(net).from_pretrained(tmp_path / "MODEL")


@pytest.mark.parametrize(
    "files, says",
    [
        (["model.safetensors", "optimizer.pt"], "without ZeRO, .* weights with from_pretrained"),
        (
            ["pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"],
            "under FSDP, .* weights, which hf-zero convert-checkpoint .* MODEL writes, with from",
        ),
    ],
)
def test_a_checkpoint_of_a_trainer_without_zero_is_called_one(
    files: list[str], says: str, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint-1"
    for name in ("trainer_state.json", "scheduler.pt", *files):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"global_step": 1}')
    run = routed("ours", 2, tmp_path)
    with pytest.raises(CheckpointError, match=f"is a checkpoint of a Trainer {says}") as raised:
        run.train(resume_from_checkpoint=str(folder))
    assert "whole" not in str(raised.value)


@pytest.mark.parametrize("named", [True, False])
def test_checkpoints_of_the_model_alone_are_nothing_to_resume_from(
    named: bool, tmp_path: Path
) -> None:
    routed("ours", 3, tmp_path, **EVERY_STEP, save_only_model=True).train()
    run = routed("ours", 3, tmp_path, max_steps=6)
    rest = rf".*\. No other checkpoint in {tmp_path} is whole$" if named else ""
    with pytest.raises(
        CheckpointError, match=rf"whole weights and nothing that training resumes from{rest}"
    ):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4") if named else True)


def test_missing_random_states_are_said(whole: Any, tmp_path: Path, heard: list[str]) -> None:
    folder = copied(whole, tmp_path)
    (folder / "checkpoint-4" / "rng_state.pth").unlink()
    routed("ours", 2, folder).train(resume_from_checkpoint=True)
    assert any(
        "has no rng_state.pth: the random numbers of this rank do not go on" in text
        for text in heard
    )


def test_a_plain_trainer_is_left_alone(tmp_path: Path) -> None:
    run = routed("plain", 0, tmp_path, **EVERY_STEP)
    run.train()
    tear("half a state of the Trainer", tmp_path / "checkpoint-4")
    with pytest.raises(ValueError):
        routed("plain", 0, tmp_path, **EVERY_STEP).train(resume_from_checkpoint=True)


def kept(folder: Path) -> list[str]:
    return sorted(
        path.name for path in folder.iterdir() if path.name.startswith(("checkpoint", "_", "."))
    )


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
        assert any(
            f"checkpoint-{step} is damaged and is neither counted nor removed" in text
            for text in heard
        )


@pytest.mark.parametrize("route", ["ours", "stock"])
def test_the_limit_of_the_trainer(route: str, tmp_path: Path) -> None:
    """The newest checkpoints stay, and the best beside the newest, as without hf-zero."""
    run = routed(route, 3, tmp_path / "two", **EVERY_STEP, save_total_limit=2)
    run.train()
    assert kept(tmp_path / "two") == ["checkpoint-3", "checkpoint-4"]
    run = routed(route, 3, tmp_path / "best", **EVERY_STEP, **BEST, save_total_limit=2)
    run.train()
    assert kept(tmp_path / "best") == ["checkpoint-1", "checkpoint-4"]


class Tearing(transformers.TrainerCallback):
    """Damages checkpoints of a run when its last step is done."""

    def __init__(self, *chosen: str) -> None:
        self.chosen = chosen

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == state.max_steps:
            for name in self.chosen:
                tear("a shard cut short", Path(args.output_dir) / name)


@pytest.mark.parametrize(
    "torn, loaded",
    [
        (("checkpoint-1",), 1),
        (("checkpoint-1", "checkpoint-2"), 2),
        (("checkpoint-1", "checkpoint-2", "checkpoint-3"), 3),
    ],
)
def test_the_best_whole_model_is_loaded_at_the_end(
    torn: tuple[str, ...], loaded: int, tmp_path: Path, heard: list[str]
) -> None:
    # A learning rate that spoils the model: each evaluation is worse than the one before, all but
    # the last.
    run = routed("ours", 2, tmp_path, **EVERY_STEP, **BEST, callbacks=[Tearing(*torn)])
    run.train()
    losses = logged(run, "eval_loss")
    assert min(losses) == losses[0]
    left = {step: loss for step, loss in enumerate(losses, 1) if f"checkpoint-{step}" not in torn}
    chosen = min(left, key=lambda step: left[step])
    assert run.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{chosen}")
    assert run.state.best_metric == left[chosen]
    assert any(
        "the best checkpoint" in text and "checkpoint-1 is not whole" in text for text in heard
    )
    assert run.evaluate()["eval_loss"] == pytest.approx(left[chosen], rel=1e-6)


def test_the_best_of_checkpoints_of_the_model_alone_stays_the_best(
    tmp_path: Path, heard: list[str]
) -> None:
    best = {**SPOILED, "metric_for_best_model": "loss", "save_total_limit": 1}
    run = routed("ours", 3, tmp_path, **EVERY_STEP, **best, save_only_model=True)
    run.train()
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    assert kept(tmp_path) == ["checkpoint-1"]
    assert not [text for text in heard if "whole" in text]


def test_if_no_best_model_is_whole_the_trained_one_stays(tmp_path: Path, heard: list[str]) -> None:
    best = {
        **BEST,
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "learning_rate": 1e-3,
    }

    class All(transformers.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            tear("a shard cut short", tmp_path / f"checkpoint-{state.global_step}")

    run = routed("ours", 2, tmp_path, **best, callbacks=[All()])
    run.train()
    assert any(
        "no checkpoint with a metric is whole: the model stays as training has left it" in text
        for text in heard
    )
    assert run.evaluate()["eval_loss"] == pytest.approx(logged(run, "eval_loss")[1], rel=1e-6)


class Hub:
    """The part of the hub's client that the Trainer calls: uploads are copies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create_repo(self, repo_id: str, **options: Any) -> Any:
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(
        self,
        *,
        folder_path: Any,
        path_in_repo: str = ".",
        ignore_patterns: Any = None,
        run_as_future: bool = False,
        **options: Any,
    ) -> Any:
        from huggingface_hub.utils import filter_repo_objects

        source = Path(folder_path)
        found = [
            path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()
        ]
        for name in filter_repo_objects(found, ignore_patterns=ignore_patterns):
            target = self.folder / path_in_repo / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, target)
        done = SimpleNamespace(
            is_done=lambda: True,
            done=lambda: True,
            result=lambda *a: None,
            add_done_callback=lambda call: None,
        )
        return done if run_as_future else None


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    client = Hub(tmp_path / "hub")
    monkeypatch.setattr("transformers.trainer.hf_api", lambda *a, **k: client)
    monkeypatch.setattr("transformers.trainer.create_repo", client.create_repo, raising=False)
    return tmp_path / "hub"


@pytest.mark.parametrize("stage", (0, 3))
def test_what_is_pushed_to_the_hub(stage: int, hub: Path, tmp_path: Path) -> None:
    """A model folder that loads as it is and, where asked for, the last checkpoint, which
    resumes; nothing half done of ours.
    """
    pushed = {
        **EVERY_STEP,
        "push_to_hub": True,
        "hub_model_id": "someone/tiny",
        "hub_strategy": "checkpoint",
        "hub_always_push": True,
    }
    run = routed("ours", stage, tmp_path / "run", **pushed, save_total_limit=1)
    run.train()
    run.push_to_hub()
    names = {path.relative_to(hub).as_posix() for path in hub.rglob("*") if path.is_file()}
    assert {"config.json", "model.safetensors", "training_args.bin", "README.md"} <= names
    own = {f"last-checkpoint/global_step4/{name}" for name in ("manifest.json", RANK)}
    assert {*own, "last-checkpoint/latest", "last-checkpoint/trainer_state.json"} <= names
    assert not [
        name
        for name in names
        if find.RESERVED in name or "dropped" in name or name.startswith("checkpoint-")
    ]
    loaded, info = transformers.AutoModelForMaskedLM.from_pretrained(hub, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    trained = weights(run)
    assert all(torch.equal(value, trained[name]) for name, value in loaded.state_dict().items())
    resumed = routed("ours", 1, tmp_path / "again", max_steps=5)
    resumed.train(resume_from_checkpoint=str(hub / "last-checkpoint"))
    assert resumed.state.global_step == 5 and logged(resumed)[:4] == logged(run)


def no_seam(call: Callable[..., Any]) -> Callable[..., Any]:
    return call.__wrapped__  # type: ignore[attr-defined, no-any-return]


def test_other_folders_rotate_as_before(tmp_path: Path) -> None:
    """Checkpoints of the model alone, and those of a plain Trainer."""
    for step in (1, 2, 3):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"")
    assert transformers.trainer.rotate_checkpoints is not no_seam(
        transformers.trainer.rotate_checkpoints
    )
    transformers.trainer.rotate_checkpoints(str(tmp_path), save_total_limit=2)
    assert kept(tmp_path) == ["checkpoint-2", "checkpoint-3"]


def test_storage_that_fails_while_checkpoints_are_looked_at(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 looks alone: what it meets is an error on every rank."""

    def failing(parent: Path, name: str) -> list[Path]:
        raise OSError(5, "Input/output error", str(parent))

    monkeypatch.setattr(
        "hf_zero.integrations.transformers.trainer_checkpoints.numbered_folders", failing
    )
    run = routed("ours", 2, copied(whole, tmp_path))
    with pytest.raises(CheckpointError, match="run: Input/output error; check the storage"):
        run.train(resume_from_checkpoint=True)
