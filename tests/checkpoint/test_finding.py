"""The choice of a checkpoint in a folder of runs, and ``verify`` of folders: the newest complete
one of ours, and never a model that is in the folder as well.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from hf_zero import checkpoint
from hf_zero.checkpoint.find import checkpoints_below, find_checkpoint
from hf_zero.cli.app import app
from hf_zero.errors import CheckpointError
from tests.checkpoint.jobs import Job, edit
from tests.checkpoint.jobs import saved as save


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint, as Accelerate's save_state lays it out: in a folder with `latest`."""
    folder = tmp_path_factory.mktemp("saved") / "state"
    save(folder, Job(2, 1), tag="pytorch_model")
    return folder


def model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    save_file({"weight": torch.ones(3)}, folder / "model.safetensors", {"format": "pt"})
    return folder


def set_step(path: Path, step: int) -> None:
    edit(path, lambda manifest: manifest["counters"].update(global_steps=step))


@pytest.fixture
def states(saved: Path, tmp_path: Path) -> Path:
    """The folder of a run: the state of the lowest number is the newest; a model is newer still."""
    folder = tmp_path / "runs" / "quickstart"
    for age, name in enumerate(("step_20", "step_100", "step_3")):
        shutil.copytree(saved, folder / name)
        set_step(folder / name / "pytorch_model" / "manifest.json", 1 + age)
    model(folder / "model")
    return folder


def damage(folder: Path) -> None:
    file = next(folder.glob("pytorch_model/rank-*"))
    file.write_bytes(file.read_bytes()[:-8])


def test_the_newest_whole_one_is_taken_and_named(states: Path, heard_in_full: list[str]) -> None:
    runs, newest = states.parent, states / "step_3" / "pytorch_model"
    below = [folder.parent.name for folder in checkpoints_below(runs)]
    assert below == ["step_20", "step_100", "step_3"]
    assert find_checkpoint(runs) == find_checkpoint(states) == newest
    assert any(f"taking {newest}, the newest complete" in line for line in heard_in_full)
    damage(states / "step_3")
    assert find_checkpoint(runs) == states / "step_100" / "pytorch_model"
    assert any(f"{newest} is skipped" in line for line in heard_in_full)
    assert find_checkpoint(runs, complete=False) == newest
    for name in ("step_20", "step_100"):
        damage(states / name)
    with pytest.raises(CheckpointError, match=r"each of the 3 .*: quickstart/step_3/pytorch_model"):
        find_checkpoint(runs)


def test_a_tag_may_name_a_folder_that_holds_the_checkpoint(states: Path) -> None:
    assert find_checkpoint(states, "step_20") == states / "step_20" / "pytorch_model"
    with pytest.raises(CheckpointError, match=r"'step_7' .* folders step_100, step_20, step_3"):
        find_checkpoint(states, "step_7")


def test_a_model_folder_is_taken_by_its_own_name_alone(states: Path, tmp_path: Path) -> None:
    folder, models = states / "model", tmp_path / "models"
    assert find_checkpoint(folder) == folder
    for name in ("one", "two"):
        shutil.copytree(folder, models / name)
    with pytest.raises(CheckpointError, match=r"no checkpoint of hf-zero in .*models.*: one, two"):
        find_checkpoint(models)
    # a Trainer's output folder is both
    shutil.copytree(states / "step_3", models / "one" / "state")
    assert find_checkpoint(models / "one") == models / "one" / "state" / "pytorch_model"


def command(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_verify_finds_checkpoints_and_models_at_any_depth(states: Path, tmp_path: Path) -> None:
    def rows() -> dict[str, tuple[str, bool]]:
        ran = command("verify", states.parent, "--all", "--json")
        found = {row["folder"]: (row["kind"], row["whole"]) for row in json.loads(ran.stdout)}
        assert ran.exit_code == (0 if all(whole for _, whole in found.values()) else 1)
        return {str(Path(name).relative_to(states)): told for name, told in found.items()}

    steps = [f"{name}/pytorch_model" for name in ("step_20", "step_100", "step_3")]
    wanted = {**dict.fromkeys(steps, ("checkpoint", True)), "model": ("model", True)}
    assert rows() == wanted
    ran = command("convert-checkpoint", states.parent, tmp_path / "out", "--json")
    assert ran.exit_code == 0 and json.loads(ran.stdout)["source"] == str(states / steps[2])
    ran = command("verify", states)
    assert ran.exit_code == 0 and "whole" in ran.stdout and steps[2] in ran.stdout
    damage(states / "step_3")
    newest = command("verify", states)  # the newest is checked, not the newest whole one
    assert newest.exit_code == 1 and "cut short" in newest.stderr and "damaged" in newest.stdout
    assert rows() == {**wanted, steps[2]: ("checkpoint", False)}
    (states / steps[0] / "manifest.json").unlink()
    every = command("verify", states.parent, "--all")
    assert every.exit_code == 1
    assert f"{steps[0]}/manifest.json is missing" in every.stderr
    assert "no checkpoint 'pytorch_model'" in every.stderr


DAMAGES = {
    "its tensors end at byte": lambda file: file.write_bytes(file.read_bytes()[:-4]),
    "is damaged": lambda file: file.write_bytes(b"{"),
    "cannot be opened": lambda file: file.unlink(),
}


def test_a_damaged_model_folder(tmp_path: Path) -> None:
    for at, (says, break_it) in enumerate(DAMAGES.items()):
        folder = model(tmp_path / str(at) / "model")
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"weight": "model.safetensors"}}))
        assert command("verify", folder).exit_code == 0
        break_it(folder / "model.safetensors")
        ran = command("verify", folder.parent, "--all")
        assert ran.exit_code == 1 and says in ran.stderr
    folder = model(tmp_path / "model")
    index = folder / "model.safetensors.index.json"
    places = dict.fromkeys(["weight", "bias"], "model.safetensors")
    index.write_text(json.dumps({"weight_map": places}))
    (problem,) = checkpoint.verify_checkpoint(folder).problems
    assert "model.safetensors lacks bias" in problem and index.name in problem
    index.write_text("{")
    assert "index.json is damaged" in checkpoint.verify_checkpoint(folder).problems[0]


def test_what_another_program_left_is_taken_where_it_is_alone(tmp_path: Path) -> None:
    def deepspeed(folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "mp_rank_00_model_states.pt").touch()
        return folder

    one = deepspeed(tmp_path / "run" / "global_step1")
    model(tmp_path / "run" / "model")
    assert find_checkpoint(tmp_path / "run") == one
    deepspeed(tmp_path / "run" / "global_step2")
    with pytest.raises(CheckpointError, match="pass it: global_step1, global_step2, model"):
        find_checkpoint(tmp_path / "run")
