"""Retention of checkpoints: the newest complete ones stay.

Damaged ones, the one that `latest` names and folders with other names stay, too.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hf_zero.checkpoint import commit, find, storage
from hf_zero.config import ZeroConfig
from tests.checkpoint.jobs import TWO, errors, run_holds, saved
from tests.helpers.engines import start
from tests.helpers.models import ARCHITECTURES
from tests.helpers.training import adamw


def save(folder: Path, *steps: int, **options):
    for step in steps:
        saved(folder, TWO, step, **options)


def cut_short(folder: Path) -> None:
    os.truncate(next(folder.glob("rank-00001*")), 100)


def test_the_newest_stay(tmp_path):
    """The last saved is the newest whatever its number. Without a number all stay."""
    save(tmp_path, 1, 2)
    assert find.tags_in(tmp_path) == ["global_step1", "global_step2"]
    save(tmp_path, 10, keep=2)
    assert run_holds(tmp_path) == ["global_step10", "global_step2"]
    save(tmp_path, 1, keep=1)
    assert find.tags_in(tmp_path) == ["global_step1"]


def test_other_names_are_not_looked_at(tmp_path):
    for tag in ("best", "epoch1"):
        save(tmp_path, 1, tag=tag)
    (tmp_path / "global_step0").mkdir()
    (tmp_path / "global_step0" / "notes.txt").write_text("mine")
    save(tmp_path / "kept", 1)
    os.symlink(tmp_path / "kept" / "global_step1", tmp_path / "global_step5")
    save(tmp_path, 2, 3, keep=1)
    numbered = [f"global_step{step}" for step in (0, 3, 5)]
    assert run_holds(tmp_path) == ["best", "epoch1", *numbered, "kept"]
    assert find.is_checkpoint(tmp_path / "global_step5")


def test_what_latest_names_stays(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2, 3, save_latest=False, keep=1)
    assert sorted(find.tags_in(tmp_path)) == ["global_step1", "global_step3"]
    assert find.locate(tmp_path).name == "global_step1"


def test_damaged_ones_are_neither_counted_nor_removed(tmp_path, heard):
    save(tmp_path, 1, 2, 3)
    cut_short(tmp_path / "global_step3")
    save(tmp_path, 4, keep=2)
    assert sorted(find.tags_in(tmp_path)) == ["global_step2", "global_step3", "global_step4"]
    assert any("global_step3 is damaged" in text and "cut short" in text for text in heard)


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
    assert any("could not delete" in text and "global_step1" in text for text in heard)
    monkeypatch.undo()
    save(tmp_path, 3, keep=1)
    assert find.tags_in(tmp_path) == ["global_step3"]


def test_leftovers_of_stopped_saves_go(tmp_path):
    """Of a removal; and one that was replaced does not come back."""
    save(tmp_path, 1)
    os.rename(tmp_path / "global_step1", tmp_path / ".hf-zero-dropped-global_step1")
    save(tmp_path, 2)
    assert run_holds(tmp_path) == ["global_step2"]
    save(tmp_path, 1)
    os.rename(tmp_path / "global_step2", tmp_path / ".hf-zero-replaced-global_step1")
    commit.drop(tmp_path / "global_step1")
    assert run_holds(tmp_path) == []


def test_numbers_that_cannot_be_kept(tmp_path):
    for keep in (0, -1, True, 1.5):
        for text in errors(saved, tmp_path, keep=keep):
            assert f"keep={keep!r} is no number of checkpoints" in text
        with pytest.raises(ValueError, match=r"checkpoint\.keep"):
            ZeroConfig.from_dict({"checkpoint": {"keep": keep}})
    assert not (tmp_path / "latest").exists()
    assert ZeroConfig.from_dict({"checkpoint": {"keep": 3}}).checkpoint.keep == 3
    assert ZeroConfig.from_dict({}).checkpoint.keep is None


def test_the_key_of_the_configuration(tmp_path):
    """The key applies to tags that the engine chooses, the argument to tags of the script."""
    model = ARCHITECTURES["gpt2"].build()
    config = {"train_micro_batch_size_per_gpu": 1, "checkpoint": {"keep": 2}}
    engine = start(model, adamw(model), config | {"zero_optimization": {"stage": 1}})
    for step in (1, 2, 3):
        engine.counters.global_steps = step
        engine.save_checkpoint(str(tmp_path))
        engine.save_checkpoint(str(tmp_path / "own"), tag=f"s{step}")
        engine.save_checkpoint(str(tmp_path / "own"), tag=f"t{step}", keep=1)
    assert sorted(find.tags_in(tmp_path)) == ["global_step2", "global_step3"]
    assert sorted(find.tags_in(tmp_path / "own")) == ["s1", "s2", "s3", "t3"]
    engine.destroy()
