"""Retention of checkpoints: the newest complete ones stay.

Damaged ones, the one that `latest` names and folders with other names stay, too.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from hf_zero import checkpoint
from hf_zero.checkpoint import commit, find, storage
from hf_zero.config import ZeroConfig
from tests.checkpoint.jobs import TWO, errors, run, run_holds, small, train_some
from tests.helpers.engines import start
from tests.helpers.models import ARCHITECTURES
from tests.helpers.training import adamw


def save(folder: Path, step: int, **options):
    return run(
        TWO,
        small,
        lambda engine: (train_some(engine, step), checkpoint.save(engine, folder, **options)),
    )


def cut_short(folder: Path) -> None:
    with open(next(folder.glob("rank-00001*")), "r+b") as file:
        file.truncate(100)


def test_the_newest_stay(tmp_path):
    for step in (1, 2, 3, 10):
        save(tmp_path, step, keep=2)
    assert run_holds(tmp_path) == ["global_step10", "global_step3"]


def test_the_last_saved_is_the_newest_whatever_its_number(tmp_path):
    """Resumed from an older one in a folder that holds later steps."""
    for step in (7, 8, 2):
        save(tmp_path, step, keep=1)
    assert find.tags_in(tmp_path) == ["global_step2"]


def test_without_a_number_all_stay(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert len(find.tags_in(tmp_path)) == 3


def test_other_names_are_not_looked_at(tmp_path):
    save(tmp_path, 1, tag="best")
    save(tmp_path, 1, tag="epoch1")
    (tmp_path / "global_step0").mkdir()
    (tmp_path / "global_step0" / "notes.txt").write_text("mine")
    (tmp_path / "kept").mkdir()
    save(tmp_path / "kept", 1)
    os.symlink(tmp_path / "kept" / "global_step1", tmp_path / "global_step5")
    for step in (2, 3):
        save(tmp_path, step, keep=1)
    assert run_holds(tmp_path) == [
        "best",
        "epoch1",
        "global_step0",
        "global_step3",
        "global_step5",
        "kept",
    ]
    assert find.is_checkpoint(tmp_path / "global_step5")


def test_what_latest_names_stays(tmp_path):
    save(tmp_path, 1)
    for step in (2, 3):
        save(tmp_path, step, save_latest=False, keep=1)
    assert sorted(find.tags_in(tmp_path)) == ["global_step1", "global_step3"]
    assert find.locate(tmp_path).name == "global_step1"


def test_damaged_ones_are_neither_counted_nor_removed(tmp_path, heard):
    for step in (1, 2, 3):
        save(tmp_path, step)
    cut_short(tmp_path / "global_step3")
    save(tmp_path, 4, keep=2)
    assert sorted(find.tags_in(tmp_path)) == ["global_step2", "global_step3", "global_step4"]
    assert any(
        "global_step3 is damaged and is neither counted nor removed" in text and "cut short" in text
        for text in heard
    )


def test_nothing_goes_if_the_new_one_is_damaged(tmp_path, monkeypatch, heard):
    """A disk that loses what it has just been given is not to be trusted with the rest."""
    save(tmp_path, 1)
    published = commit.publish_folder

    def losing(temporary, tag):
        final = published(temporary, tag)
        cut_short(final)
        return final

    monkeypatch.setattr(commit, "publish_folder", losing)
    save(tmp_path, 2, keep=1)
    assert sorted(find.tags_in(tmp_path)) == ["global_step1", "global_step2"]
    assert any("global_step2 is damaged" in text for text in heard)


def test_one_that_cannot_be_removed_is_a_warning(tmp_path, monkeypatch, heard):
    save(tmp_path, 1)

    def busy(source, target):
        raise OSError(errno.EACCES, "Permission denied", str(source))

    monkeypatch.setattr(storage, "rename_durably", busy)
    save(tmp_path, 2, keep=1)
    assert sorted(find.tags_in(tmp_path)) == ["global_step1", "global_step2"]
    assert any(
        "could not delete old checkpoint" in text
        and "global_step1" in text
        and "make the folder writable" in text
        for text in heard
    )
    monkeypatch.undo()
    save(tmp_path, 3, keep=1)
    assert find.tags_in(tmp_path) == ["global_step3"]


def test_leftovers_of_a_removal_go_with_the_next_save(tmp_path):
    save(tmp_path, 1)
    os.rename(tmp_path / "global_step1", tmp_path / ".hf-zero-dropped-global_step1")
    save(tmp_path, 2)
    assert run_holds(tmp_path) == ["global_step2"]


def test_one_that_a_stopped_save_had_replaced_does_not_come_back(tmp_path):
    for step in (1, 1, 2):
        save(tmp_path, step)
    os.rename(tmp_path / "global_step2", tmp_path / ".hf-zero-replaced-global_step1")
    commit.drop(tmp_path / "global_step1")
    assert run_holds(tmp_path) == []


@pytest.mark.parametrize("keep", [0, -1, True, 1.5])
def test_numbers_that_cannot_be_kept(tmp_path, keep):
    for text in errors(save, tmp_path, 1, keep=keep):
        assert f"keep={keep!r} is no number of checkpoints; pass 1 or more" in text
    assert not (tmp_path / "latest").exists()


def test_the_key_of_the_configuration(tmp_path):
    """The key applies to tags that the engine chooses, the argument to tags of the script."""
    model = ARCHITECTURES["gpt2"].build()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "checkpoint": {"keep": 2},
    }
    engine = start(model, adamw(model), config)
    for step in (1, 2, 3):
        engine.counters.global_steps = step
        engine.save_checkpoint(str(tmp_path))
        engine.save_checkpoint(str(tmp_path / "own"), tag=f"s{step}")
        engine.save_checkpoint(str(tmp_path / "own"), tag=f"t{step}", keep=1)
    assert sorted(find.tags_in(tmp_path)) == ["global_step2", "global_step3"]
    assert sorted(find.tags_in(tmp_path / "own")) == ["s1", "s2", "s3", "t3"]
    engine.destroy()


def test_the_key_is_read_strictly():
    assert ZeroConfig.from_dict({"checkpoint": {"keep": 3}}).checkpoint.keep == 3
    assert ZeroConfig.from_dict(json.loads("{}")).checkpoint.keep is None
    with pytest.raises(ValueError, match=r"checkpoint\.keep"):
        ZeroConfig.from_dict({"checkpoint": {"keep": 0}})
