"""Folders and names as people have them: links, other jobs, working folders that change, a
``latest`` that somebody edited.
"""

from __future__ import annotations

import locale
import os
import shutil
import stat
import threading
from pathlib import Path

import pytest

from hf_zero import checkpoint
from hf_zero.checkpoint import find, save_job
from hf_zero.checkpoint.commit import CommitTarget
from hf_zero.checkpoint.find import LATEST, SAVING
from hf_zero.errors import CheckpointError
from tests.checkpoint.jobs import (
    ONE,
    RANK1,
    TWO,
    errors,
    fails,
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
from tests.checkpoint.test_engine import Setup
from tests.checkpoint.test_failures import refused
from tests.helpers.cells import fast
from tests.helpers.ranks import run_ranks


def saving(folder: Path) -> Path:
    """The folder in which a save is under way."""
    return next(path for path in folder.iterdir() if path.name.startswith(SAVING))


def once(monkeypatch: pytest.MonkeyPatch, before) -> None:
    """``before()`` runs when rank 0 of the first save has the files of all ranks and looks whether
    they are whole, before the folder is published.
    """
    check, called = CommitTarget._check_written, []

    def checked(target, manifest):
        if not called:
            called.append(True)
            before()
        return check(target, manifest)

    monkeypatch.setattr(CommitTarget, "_check_written", checked)


# ---- while a save is under way ----


def test_the_working_folder_changes_while_a_thread_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    write, moved = save_job.write_image, threading.Event()

    def waiting(path, *rest):
        assert moved.wait(50)
        return write(path, *rest)

    monkeypatch.setattr(save_job, "write_image", waiting)
    monkeypatch.chdir(tmp_path / "here")

    def train(rank: int) -> None:
        engine = Setup(ranks=1).open(Setup(ranks=1).models()[0])
        engine.save_checkpoint("run", tag="a", blocking=False)
        monkeypatch.chdir(tmp_path / "there")
        moved.set()
        engine.wait_for_checkpoint()
        engine.destroy()

    run_ranks(1, train)
    assert checkpoint.verify_checkpoint(tmp_path / "here" / "run").whole
    assert names(tmp_path / "there") == []


@pytest.mark.parametrize("way", ["gone", "cut short"])
def test_the_file_of_a_rank_changes_before_the_folder_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The checkpoint that the save replaces stays."""
    before = weights(saved(tmp_path, tag="a"))

    def damage() -> None:
        file = saving(tmp_path) / RANK1
        file.unlink() if way == "gone" else os.truncate(file, 5000)

    once(monkeypatch, damage)
    for text in errors(saved, tmp_path, tag="a", steps=3):
        assert RANK1 in text and "Nothing was saved as 'a'" in text
        assert ("nobody may remove it meanwhile" if way == "gone" else "has 5000 bytes") in text
    engines = load(tmp_path, verify=True)
    assert same(weights(engines), before) and run_holds(tmp_path) == ["a"]


@pytest.mark.parametrize("ends", ["first", "last"])
def test_two_jobs_save_under_one_tag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """The job that began last has the tag. The other one raises; files of both are never mixed."""
    check, calls = CommitTarget._check_written, []
    others, there, gone_on = [], threading.Event(), threading.Event()
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
        elif ends == "first":  # all files of the second job, too
            there.set()
            assert gone_on.wait(50)
        return check(target, manifest)

    saved(tmp_path, tag="a")
    monkeypatch.setattr(CommitTarget, "_check_written", checked)
    with pytest.raises(CheckpointError, match="nobody may remove it meanwhile") as refused:
        checkpoint.save(engines[0][0], tmp_path, tag="a")
    gone_on.set()
    thread.join(50)
    assert SAVING in str(refused.value) and others == [tmp_path / "a"]
    loaded = load(tmp_path, verify=True)
    assert same(weights(loaded), weights(engines[1]))
    assert run_holds(tmp_path) == ["a"]


# ---- links ----


def test_a_tag_that_is_a_link(tmp_path: Path) -> None:
    """The link is replaced; the checkpoint that it led to, and what lies beside it, stay."""
    old = weights(saved(tmp_path / "archive", tag="a"))
    (tmp_path / "archive" / "a" / "notes.txt").write_text("mine")
    archived = names(tmp_path / "archive" / "a")
    (tmp_path / "run").mkdir()
    os.symlink(tmp_path / "archive" / "a", tmp_path / "run" / "a")
    for steps in (3, 4):
        engines = saved(tmp_path / "run", tag="a", steps=steps)
        assert not (tmp_path / "run" / "a").is_symlink()
        assert run_holds(tmp_path / "run") == ["a"]
        assert same(weights(load(tmp_path / "run", verify=True)), weights(engines))
    assert names(tmp_path / "archive" / "a") == archived
    assert same(weights(load(tmp_path / "archive", verify=True)), old)


def test_a_link_that_a_stopped_save_had_replaced(tmp_path: Path) -> None:
    saved(tmp_path / "archive", tag="a"), saved(tmp_path / "run", tag="a")
    os.symlink(tmp_path / "archive" / "a", tmp_path / "run" / ".hf-zero-replaced-a")
    saved(tmp_path / "run", tag="a")
    assert run_holds(tmp_path / "run") == ["a"]
    load(tmp_path / "archive", verify=True)


def test_a_tag_that_is_a_link_to_nothing(tmp_path: Path) -> None:
    os.symlink(tmp_path / "nothing", tmp_path / "a")
    for text in errors(saved, tmp_path, tag="a"):
        assert f"{tmp_path / 'a'} exists and is no checkpoint of hf-zero; move it away" in text
    assert names(tmp_path) == ["a"]


def test_a_run_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    os.symlink(tmp_path / "disk", tmp_path / "run")
    for steps in (1, 2):
        engines = saved(tmp_path / "run", tag="a", steps=steps)
    assert (tmp_path / "run").is_symlink()
    assert same(weights(load(tmp_path / "disk")), weights(engines))


# ---- names ----


@pytest.mark.parametrize(
    "tag",
    fast(
        ["ünï 漢字", "a  b", "x" * 230, "é" * 115, "100%", "-rf", "a\\b", "'\""],
        lambda tag: tag[0] in "üé-a",
    ),
)
def test_tags_of_all_kinds(tmp_path: Path, tag: str) -> None:
    for steps in (1, 2):
        engines = saved(tmp_path / "spa ce ü", tag=tag, steps=steps, keep=1)
    loaded = load(tmp_path / "spa ce ü")
    assert same(weights(loaded), weights(engines))


@pytest.mark.parametrize(
    "tag, says",
    [
        (" a", "spaces"),
        ("a\n", "spaces"),
        ("x" * 231, "230 bytes"),
        ("é" * 116, "230 bytes"),
        ("a\udc80", "UTF-8"),
    ],
)
def test_tags_that_latest_or_the_file_system_would_not_give_back(
    tmp_path: Path, tag: str, says: str
) -> None:
    for text in errors(saved, tmp_path, tag=tag):
        assert "cannot be a tag; pass" in text and says in text
    assert names(tmp_path) == []


def test_latest_does_not_depend_on_the_locale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, tag="größe")
    monkeypatch.setattr(
        locale,
        "getencoding" if hasattr(locale, "getencoding") else "getpreferredencoding",
        lambda *_: "latin-1",
    )
    monkeypatch.setattr("io.text_encoding", lambda encoding, level=2: encoding or "latin-1")
    load(tmp_path)
    saved(tmp_path, tag="größe 2", save_latest=False, keep=1)


# ---- latest ----


@pytest.mark.parametrize(
    "content",
    fast(
        [b"", b"\n", b"../x", b"/etc", b".hf-zero-saving-a", b"a\0", b"\xff\xfe", b"a\nb/c"],
        lambda content: content in (b"", b"../x", b"a\0", b"\xff\xfe"),
    ),
    ids=repr,
)
def test_a_latest_that_names_no_tag(tmp_path: Path, content: bytes) -> None:
    saved(tmp_path, tag="a")
    (tmp_path / LATEST).write_bytes(content)
    refused(tmp_path, [str(tmp_path / LATEST), "pass one of the tags that exist: a"])
    load(tmp_path, tag="a")


def test_a_latest_that_names_what_is_gone(tmp_path: Path) -> None:
    saved(tmp_path, tag="a")
    (tmp_path / LATEST).write_text("b")
    refused(
        tmp_path, ["no checkpoint 'b'", str(tmp_path / "b"), "pass one of the tags that exist: a"]
    )


def test_a_latest_that_is_no_text_file(tmp_path: Path) -> None:
    """A terabyte of it is not read."""
    saved(tmp_path, tag="a")
    with open(tmp_path / LATEST, "wb") as file:
        file.truncate(1 << 40)
    refused(tmp_path, [f"{tmp_path / LATEST} ", "pass one of the tags that exist: a"])
    (tmp_path / LATEST).unlink()
    (tmp_path / LATEST).mkdir()
    refused(tmp_path, [f"{tmp_path / LATEST} ", "pass one of the tags that exist: a"])


def test_nothing_is_removed_while_latest_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    monkeypatch.setattr(
        "hf_zero.checkpoint.commit.logger.warning", lambda text, *args: heard.append(text % args)
    )
    saved(tmp_path, tag="s1")
    (tmp_path / LATEST).write_bytes(b"\xff")
    saved(tmp_path, tag="s2", save_latest=False, keep=1)
    assert find.tags_in(tmp_path) == ["s1", "s2"]
    assert any("retention skipped" in text and str(tmp_path / LATEST) in text for text in heard)


# ---- ranks that do not see the same ----


def each_loads(where) -> None:
    run(TWO, small, lambda engine: checkpoint.load(engine, *where(engine.global_rank)))


def test_ranks_that_load_different_checkpoints(tmp_path: Path) -> None:
    """Each is whole and of the same model; half of one and half of the other is not a state that
    training was ever in.
    """
    for steps in (1, 2):
        saved(tmp_path, tag=f"t{steps}", steps=steps)
    fails(
        [
            "rank 0 t1 (",
            "rank 1 t2 (",
            "pass the same folder and tag on every rank",
            "Nothing was loaded",
        ],
        each_loads,
        lambda rank: (tmp_path, f"t{rank + 1}"),
    )


def test_ranks_that_see_different_saves_of_one_tag(tmp_path: Path) -> None:
    for folder in ("0", "1"):
        saved(tmp_path / folder, tag="a")
    fails(
        ["the ranks see different checkpoints", "Nothing was loaded"],
        each_loads,
        lambda rank: [tmp_path / str(rank)],
    )
    shutil.rmtree(tmp_path / "1")
    # one folder that two machines have mounted under different names
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    each_loads(lambda rank: [tmp_path / str(rank)])


# ---- permissions ----


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077, 0o002])
def test_files_have_the_permissions_that_the_umask_leaves(tmp_path: Path, mask: int) -> None:
    old = os.umask(mask)
    try:
        saved(tmp_path / "run", tag="a", client_state={"pair": (1, 2)})
    finally:
        os.umask(old)
    for path in (tmp_path / "run").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o777 if path.is_dir() else 0o666) & ~mask, (
            path
        )
