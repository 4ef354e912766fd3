"""Tags, ``latest``, links, permissions, two jobs in one folder, what an interrupted save leaves;
retention: the newest complete checkpoints stay, as do damaged ones, the one that ``latest`` names
and folders with other names; their order is that of the saves, never of a clock.
"""

from __future__ import annotations

import os
import shutil
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero import checkpoint
from hf_zero.checkpoint import find
from hf_zero.checkpoint.commit import CommitTarget, FolderTarget
from hf_zero.checkpoint.find import DROPPED, LATEST, REPLACED, SAVING, find_checkpoint
from hf_zero.checkpoint.manifest import MANIFEST_NAME
from hf_zero.checkpoint.manifest_reading import read_manifest
from hf_zero.config import ZeroConfig
from hf_zero.errors import CheckpointError
from tests.checkpoint.jobs import (
    ONE,
    edit,
    errors,
    load,
    names,
    run,
    run_holds,
    same,
    saved,
    small,
    train_some,
    weights,
)
from tests.checkpoint.setups import held
from tests.helpers.engines import config_of, start
from tests.helpers.models import ARCHITECTURES
from tests.helpers.stacks import on_each_rank, run_steps
from tests.helpers.training import adamw

__all__ = ["held"]

ID = "0123456789abcdef" * 2


def made(path: Path, content: str = "{}") -> Path:
    path.mkdir(parents=True)
    (path / MANIFEST_NAME).write_text(content)
    return path


NO_TAGS = [
    "",
    ".",
    "..",
    "a/b",
    "/a",
    ".hidden",
    "latest",
    "zero_to_fp32.py",
    "a\0b",
    ".hf-zero-saving-x",
]
NO_TAGS += [" a", "a\n", "x" * 231, "é" * 116, "a\udc80"]
ODD_TAGS = ["ünï 漢字", "a  b", "x" * 230, "é" * 115, "100%", "-rf", "a\\b", "'\"", "best model"]


def test_tags(tmp_path: Path) -> None:
    for tag in NO_TAGS:
        with pytest.raises(CheckpointError, match="cannot be a tag"):
            find.check_tag(tag)
    assert [find.check_tag(tag) for tag in (*ODD_TAGS, 7)] == [*ODD_TAGS, "7"]
    for steps, tag in enumerate(("é" * 115, "-rf", "a\\b ü"), 1):
        for _ in range(2):
            engines = saved(tmp_path / "spa ce ü", ONE, tag=tag, steps=steps, keep=1)
        assert same(weights(load(tmp_path / "spa ce ü", ONE)), weights(engines)), tag


def test_latest_names_the_checkpoint_and_what_is_missing_is_named(tmp_path: Path) -> None:
    a, _ = made(tmp_path / "a"), made(tmp_path / "b")
    (tmp_path / "c").mkdir()
    for step in ("step_20", "step_40"):  # as Accelerate's save_state lays them out
        made(tmp_path / "runs" / step / "global_step1")
    for place, tag, said in (
        (tmp_path, None, "latest is missing or unreadable; .*: a, b"),
        (tmp_path, "c", "no checkpoint 'c' in .*: a, b"),
        (tmp_path / "c", None, "there is no checkpoint of hf-zero in it"),
        (tmp_path / "nothing", None, r"no such folder \(looked for .*nothing\)"),
        (tmp_path / "runs", None, "its folders step_20, step_40 hold checkpoints"),
    ):
        with pytest.raises(CheckpointError, match=said):
            find.locate(place, tag)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        find_checkpoint(tmp_path / "nothing")
    (tmp_path / "latest").write_text("a\n")
    assert a == find.locate(tmp_path) == find.locate(tmp_path, "a")
    assert a == find_checkpoint(tmp_path) == find_checkpoint(tmp_path / "a")
    (tmp_path / "c" / "latest").write_text("../a")
    with pytest.raises(CheckpointError, match="cannot be a tag"):
        find.locate(tmp_path / "c")


def test_a_tag_that_is_a_link(tmp_path: Path) -> None:
    """The link is replaced; the checkpoint that it led to, and what lies beside it, stay."""
    archive, folder = tmp_path / "archive", tmp_path / "run"
    old = weights(saved(archive, ONE, tag="a"))
    (archive / "a" / "notes.txt").write_text("mine")
    archived = names(archive / "a")
    folder.mkdir()
    os.symlink(archive / "a", folder / "a")
    for steps in (3, 4):
        engines = saved(folder, ONE, tag="a", steps=steps)
        assert not (folder / "a").is_symlink() and run_holds(folder) == ["a"]
        assert same(weights(load(folder, ONE, verify=True)), weights(engines))
    os.symlink(archive / "a", folder / f"{REPLACED}a")  # that a stopped save had replaced
    saved(folder, ONE, tag="a")
    assert run_holds(folder) == ["a"] and names(archive / "a") == archived
    assert same(weights(load(archive, ONE, verify=True)), old)
    os.symlink(tmp_path / "nothing", folder / "b")
    for text in errors(saved, folder, ONE, tag="b"):
        assert f"{folder / 'b'} exists and is no checkpoint" in text


def test_a_save_that_was_stopped_around_its_renames(tmp_path: Path) -> None:
    """The checkpoint that was moved aside is found, and put back by the next save of the tag,
    unless the new one is there.
    """
    old, new = made(tmp_path / ".hf-zero-replaced-a", "old"), tmp_path / "a"
    (tmp_path / "latest").write_text("a")
    assert find.locate(tmp_path) == old
    FolderTarget(tmp_path, "a", ID).prepare()
    assert (new / MANIFEST_NAME).read_text() == "old" and not old.exists()
    made(old, "older")
    (old / "notes.txt").write_text("mine")
    assert find.locate(tmp_path) == new
    FolderTarget(tmp_path, "a", ID).prepare()
    assert (new / MANIFEST_NAME).read_text() == "old" and not old.exists()
    assert (new / "notes.txt").read_text() == "mine"
    for kind in (SAVING, REPLACED, DROPPED):
        made(tmp_path / f"{kind}z")
    assert find.tags_in(tmp_path) == ["a"]


def test_two_jobs_save_under_one_tag(tmp_path, monkeypatch):
    """The job that began last has the tag. The other one raises; files of both are never mixed."""
    check, calls = CommitTarget._check_written, []
    others, there = [], threading.Event()
    engines = [
        run(ONE, small, lambda engine, steps=steps: train_some(engine, steps))[0]
        for steps in (3, 5)
    ]

    def second() -> None:
        others.append(checkpoint.save(engines[1][0], tmp_path, tag="a"))
        there.set()

    thread = threading.Thread(target=second)

    def checked(target, manifest):
        calls.append(None)
        if len(calls) == 1:  # all files of the first job are written
            thread.start()
            assert there.wait(50)
        return check(target, manifest)

    saved(tmp_path, ONE, tag="a")
    monkeypatch.setattr(CommitTarget, "_check_written", checked)
    with pytest.raises(CheckpointError, match=f"{SAVING}.*nobody may remove it meanwhile"):
        checkpoint.save(engines[0][0], tmp_path, tag="a")
    thread.join(50)
    assert others == [tmp_path / "a"]
    assert same(weights(load(tmp_path, ONE, verify=True)), weights(engines[1]))
    assert run_holds(tmp_path) == ["a"]


def test_nothing_is_removed_while_latest_cannot_be_read(tmp_path: Path, heard: list[str]) -> None:
    saved(tmp_path, ONE, tag="s1")
    (tmp_path / LATEST).write_bytes(b"\xff")
    saved(tmp_path, ONE, tag="s2", save_latest=False, keep=1)
    assert find.tags_in(tmp_path) == ["s1", "s2"]
    assert any("retention skipped" in text and str(tmp_path / LATEST) in text for text in heard)


def save(folder: Path, *steps: int, **options):
    for step in steps:
        saved(folder, ONE, step, **options)


def cut_short(folder: Path) -> None:
    os.truncate(next(folder.glob("rank-00000*")), 100)


def test_the_newest_stay(tmp_path):
    """The last saved is the newest whatever its number. Without a number all stay."""
    save(tmp_path, 1, 2)
    assert find.tags_in(tmp_path) == ["global_step1", "global_step2"]
    save(tmp_path, 10, keep=2)
    assert find.tags_in(tmp_path) == ["global_step2", "global_step10"]
    save(tmp_path, 1, keep=1)
    assert find.tags_in(tmp_path) == ["global_step1"]


def test_other_names_and_what_latest_names_stay(tmp_path):
    for tag in ("best", "epoch1"):
        save(tmp_path, 1, tag=tag)
    (tmp_path / "global_step0").mkdir()
    (tmp_path / "global_step0" / "notes.txt").write_text("mine")
    save(tmp_path / "kept", 1)
    os.symlink(tmp_path / "kept" / "global_step1", tmp_path / "global_step5")
    save(tmp_path, 2)
    save(tmp_path, 3, 4, save_latest=False, keep=1)
    numbered = [f"global_step{step}" for step in (0, 2, 4, 5)]
    assert run_holds(tmp_path) == ["best", "epoch1", *numbered, "kept"]
    assert find.is_checkpoint(tmp_path / "global_step5")
    assert find.locate(tmp_path).name == "global_step2"


def test_damaged_ones_are_neither_counted_nor_removed(tmp_path, heard):
    save(tmp_path, 1, 2, 3)
    cut_short(tmp_path / "global_step3")
    save(tmp_path, 4, keep=2)
    assert sorted(find.tags_in(tmp_path)) == ["global_step2", "global_step3", "global_step4"]
    assert any("global_step3 is damaged" in text and "cut short" in text for text in heard)


def test_the_key_of_the_configuration(tmp_path):
    """The key applies to tags that the engine chooses, the argument to tags of the script."""
    for keep in (0, -1, True, 1.5):
        for text in errors(saved, tmp_path, ONE, keep=keep):
            assert f"keep={keep!r} is no number of checkpoints" in text
        with pytest.raises(ValueError, match=r"checkpoint\.keep"):
            ZeroConfig.from_dict({"checkpoint": {"keep": keep}})
    assert not (tmp_path / "latest").exists()
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


def training(model: nn.Module) -> Any:
    return start(model, torch.optim.AdamW(model.parameters(), 1e-2), config_of(1))


def steps(engine: Any, count: int) -> None:
    run_steps(engine, 0, range(engine.global_steps, engine.global_steps + count))


def set_back(folder: Path) -> None:
    """Give the manifest of ``folder`` the newest time of all."""
    os.utime(folder / MANIFEST_NAME, ns=(2**62, 2**62))


@on_each_rank(1)
def test_a_run_that_went_back_is_newer_than_what_it_left(
    rank: int, model: nn.Module, tmp_path: Path
) -> None:
    engine = training(model)
    for _ in range(3):
        steps(engine, 2)
        engine.save_checkpoint(str(tmp_path))
    engine.load_checkpoint(str(tmp_path), "global_step2")
    steps(engine, 1)
    engine.save_checkpoint(str(tmp_path))
    assert find.tags_in(tmp_path)[-1] == "global_step3"
    steps(engine, 2)
    engine.save_checkpoint(str(tmp_path), keep=2)
    assert find.tags_in(tmp_path) == ["global_step3", "global_step5"]
    engine.destroy()


@on_each_rank(1)
def test_checkpoints_of_earlier_versions_come_first_by_step(
    rank: int, model: nn.Module, tmp_path: Path
) -> None:
    engine = training(model)
    for tag in ("b", "a", "c"):
        steps(engine, 1)
        engine.save_checkpoint(str(tmp_path), tag)
    for tag in ("a", "b"):
        edit(tmp_path / tag / MANIFEST_NAME, lambda manifest: manifest.pop("order"))
    set_back(tmp_path / "b")
    assert find.tags_in(tmp_path) == ["b", "a", "c"]
    shutil.copytree(tmp_path / "c", tmp_path / "copy")
    engine.save_checkpoint(str(tmp_path), "d")
    assert read_manifest(tmp_path / "d" / MANIFEST_NAME).order == 4
    assert find.tags_in(tmp_path)[-1] == "d"
    (tmp_path / "d" / MANIFEST_NAME).write_text("{")  # damaged: the oldest
    assert find.tags_in(tmp_path)[0] == "d"
    engine.destroy()


def test_nothing_goes_if_the_new_one_is_damaged(tmp_path, monkeypatch, heard):
    """A disk that loses what it has just been given is not to be trusted with the rest."""
    save(tmp_path, 1)
    publish = FolderTarget.publish

    def losing(target, *files):
        publish(target, *files)
        cut_short(target.final)

    monkeypatch.setattr(FolderTarget, "publish", losing)
    save(tmp_path, 2, keep=1)
    assert sorted(find.tags_in(tmp_path)) == ["global_step1", "global_step2"]
    assert any("global_step2 is damaged" in text for text in heard)


def test_files_have_the_permissions_that_the_umask_leaves(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        saved(tmp_path / "run", tag="a", client_state={"pair": (1, 2)})
    finally:
        os.umask(old)
    for path in (tmp_path / "run").rglob("*"):
        allowed = (0o777 if path.is_dir() else 0o666) & ~0o027
        assert stat.S_IMODE(path.stat().st_mode) == allowed, path
