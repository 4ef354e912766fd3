"""The choice of a checkpoint in a folder of runs: the newest complete one of ours, and never a
model that is in the folder as well.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from hf_zero import checkpoint
from hf_zero.checkpoint.find import checkpoints_below, find_checkpoint
from hf_zero.cli.app import app
from hf_zero.errors import CheckpointError
from tests.checkpoint.jobs import Job, run, small, train_some

ONE = Job(2, 1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """One checkpoint, as Accelerate's save_state lays it out: a folder, `latest` in it, and
    ours.
    """
    folder = tmp_path_factory.mktemp("saved") / "state"

    def action(engine):
        train_some(engine, 1)
        return checkpoint.save(engine, folder, tag="pytorch_model")

    run(ONE, small, action)
    return folder


def model(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors or {"weight": torch.ones(3)}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def runs(saved, tmp_path) -> Path:
    """A folder of runs: of the states the one of the lowest number is the newest, and a model
    folder is newer than all.
    """
    for age, name in enumerate(("step_20", "step_100", "step_3")):
        shutil.copytree(saved, tmp_path / "runs" / "quickstart" / name)
        os.utime(
            tmp_path / "runs" / "quickstart" / name / "pytorch_model" / "manifest.json",
            (1000 + age, 1000 + age),
        )
    model(tmp_path / "runs" / "quickstart" / "model")
    return tmp_path / "runs"


def damage(folder: Path) -> None:
    file = next(folder.glob("rank-*"))
    file.write_bytes(file.read_bytes()[:-8])


def test_the_newest_whole_one_is_taken_and_named(runs, caplog, monkeypatch):
    monkeypatch.setattr("hf_zero.logging.logger.propagate", True)
    caplog.set_level("INFO", "hf_zero")
    states = runs / "quickstart"
    assert [folder.parent.name for folder in checkpoints_below(runs)] == [
        "step_20",
        "step_100",
        "step_3",
    ]
    assert find_checkpoint(runs) == find_checkpoint(states) == states / "step_3" / "pytorch_model"
    assert (
        f"taking {states / 'step_3' / 'pytorch_model'}, the newest complete checkpoint of 3 "
        f"in {runs}" in caplog.text
    )
    damage(states / "step_3" / "pytorch_model")
    assert find_checkpoint(runs) == states / "step_100" / "pytorch_model"
    assert f"{states / 'step_3' / 'pytorch_model'} is passed over" in caplog.text
    assert "cut short" in caplog.text
    assert find_checkpoint(runs, whole=False) == states / "step_3" / "pytorch_model"
    for name in ("step_20", "step_100"):
        damage(states / name / "pytorch_model")
    listed = (
        "each of the 3 checkpoints in .* is damaged: quickstart/step_3/pytorch_model, "
        "quickstart/step_100/pytorch_model"
    )
    with pytest.raises(CheckpointError, match=listed):
        find_checkpoint(runs)


def test_a_tag_may_name_a_folder_that_holds_the_checkpoint(runs):
    states = runs / "quickstart"
    assert find_checkpoint(states, "step_20") == states / "step_20" / "pytorch_model"
    with pytest.raises(
        CheckpointError,
        match=r"no checkpoint 'step_7' in .*; its folders step_100, step_20, "
        r"step_3 hold checkpoints",
    ):
        find_checkpoint(states, "step_7")


def test_a_model_folder_is_taken_by_its_own_name_alone(runs, tmp_path):
    folder = runs / "quickstart" / "model"
    assert find_checkpoint(folder) == folder
    shutil.copytree(folder, tmp_path / "models" / "one")
    shutil.copytree(folder, tmp_path / "models" / "two")
    with pytest.raises(
        CheckpointError,
        match=r"no checkpoint of hf-zero in .*models; if one of these is meant, pass it: one, two",
    ):
        find_checkpoint(tmp_path / "models")
    # a Trainer's output folder is both
    shutil.copytree(runs / "quickstart" / "step_3", tmp_path / "models" / "one" / "state")
    assert (
        find_checkpoint(tmp_path / "models" / "one")
        == tmp_path / "models" / "one" / "state" / "pytorch_model"
    )


def test_a_trainers_output_folder(saved, tmp_path):
    """`latest` comes last: a checkpoint that lacks it, cut off in that moment, is whole all the
    same.
    """
    for step in (9, 10, 100):
        shutil.copytree(saved, tmp_path / f"checkpoint-{step}")
        os.utime(tmp_path / f"checkpoint-{step}" / "pytorch_model" / "manifest.json", (step, step))
    (tmp_path / "checkpoint-100" / "latest").unlink()
    assert find_checkpoint(tmp_path) == tmp_path / "checkpoint-100" / "pytorch_model"


def test_what_another_program_left_is_taken_where_it_is_alone(tmp_path):
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


def test_links_that_lead_back_and_hidden_folders(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run" / "state")
    shutil.copytree(saved, tmp_path / "run" / ".hf-zero-dropped-state")
    (tmp_path / "run" / "state" / "up").symlink_to(tmp_path / "run")
    assert checkpoints_below(tmp_path / "run") == [tmp_path / "run" / "state" / "pytorch_model"]


def test_the_converter_takes_a_checkpoint_and_says_which(runs, tmp_path):
    source = str(runs / "quickstart" / "step_3" / "pytorch_model")
    done = checkpoint.convert_checkpoint(runs, tmp_path / "first")
    assert str(done.source) == source
    ran = CliRunner().invoke(
        app, ["convert-checkpoint", str(runs), str(tmp_path / "out"), "--json"]
    )
    assert ran.exit_code == 0 and json.loads(ran.stdout)["source"] == source
    assert set(checkpoint.get_fp32_state_dict_from_zero_checkpoint(runs)) == set(
        small().state_dict()
    )


def verify(*arguments: str):
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def test_verify_finds_checkpoints_and_models_at_any_depth(runs):
    ran = verify(runs, "--all", "--json")
    assert ran.exit_code == 0
    found = {
        str(Path(row["folder"]).relative_to(runs / "quickstart")): (row["kind"], row["whole"])
        for row in json.loads(ran.stdout)
    }
    assert found == {
        **{
            f"{name}/pytorch_model": ("checkpoint", True)
            for name in ("step_20", "step_100", "step_3")
        },
        "model": ("model", True),
    }
    assert verify(runs / "quickstart").exit_code == 0
    damage(runs / "quickstart" / "step_3" / "pytorch_model")
    newest = verify(runs / "quickstart")  # the newest is checked, not the newest whole one
    assert newest.exit_code == 1 and "cut short" in newest.stderr
    (runs / "quickstart" / "step_20" / "pytorch_model" / "manifest.json").unlink()
    every = verify(runs, "--all")
    assert every.exit_code == 1
    assert "step_20/pytorch_model/manifest.json is missing" in every.stderr
    assert "no checkpoint 'pytorch_model'" in every.stderr


@pytest.mark.parametrize(
    "break_it, says",
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-4]), "its tensors end at byte"),
        (lambda file: file.write_bytes(b"{"), "is damaged"),
        (lambda file: file.unlink(), "cannot be opened"),
    ],
)
def test_a_damaged_model_folder(tmp_path, break_it, says):
    folder = model(tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"weight": "model.safetensors"}})
    )
    assert verify(folder).exit_code == 0
    break_it(folder / "model.safetensors")
    ran = verify(tmp_path, "--all")
    assert ran.exit_code == 1 and says in ran.stderr


def test_an_index_that_promises_what_its_files_lack(tmp_path):
    folder = model(tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"weight": "model.safetensors", "bias": "model.safetensors"}})
    )
    problems = checkpoint.verify_checkpoint(folder).problems
    assert len(problems) == 1
    assert (
        "model.safetensors lacks bias, which model.safetensors.index.json places in it"
        in problems[0]
    )
    (folder / "model.safetensors.index.json").write_text("{")
    assert "index.json is damaged" in checkpoint.verify_checkpoint(folder).problems[0]
