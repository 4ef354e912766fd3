"""Tags, ``latest``, and what an interrupted save leaves."""

import errno
import os

import pytest

from hf_zero.checkpoint import commit, find
from hf_zero.checkpoint.commit import commit_target
from hf_zero.checkpoint.find import find_checkpoint
from hf_zero.checkpoint.manifest import MANIFEST_NAME
from hf_zero.errors import CheckpointError

ID = "0123456789abcdef" * 2


def made(path, content="{}"):
    path.mkdir(parents=True)
    (path / MANIFEST_NAME).write_text(content)
    return path


@pytest.mark.parametrize(
    "tag", ["", ".", "..", "a/b", "/a", ".hidden", "latest", "a\0b", ".hf-zero-saving-x"]
)
def test_what_cannot_be_a_tag(tag):
    with pytest.raises(CheckpointError, match="cannot be a tag; pass one path component"):
        find.check_tag(tag)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"no such folder \(looked for .*nothere\); pass"):
        find.locate(tmp_path / "nothere")


def test_any_other_name_is_a_tag():
    assert [find.check_tag(tag) for tag in ("global_step5", "best model", 7)] == [
        "global_step5",
        "best model",
        "7",
    ]


def test_temporary_names_are_not_what_trainers_look_for(tmp_path):
    commit.begin_folder(tmp_path, "global_step5", ID)
    commit.begin_folder(tmp_path, "checkpoint-5", ID)
    assert list(tmp_path.glob("global_step*")) == list(tmp_path.glob("checkpoint-*")) == []
    assert len(list(tmp_path.iterdir())) == 2
    assert find.tags_in(tmp_path) == []


def test_latest(tmp_path):
    made(tmp_path / "a")
    (tmp_path / "latest").write_text("a\n")
    assert (
        find.locate(tmp_path)
        == tmp_path / "a"
        == find.locate(tmp_path, "a")
        == find_checkpoint(tmp_path)
        == find_checkpoint(tmp_path / "a")
    )


def test_missing_names_what_exists(tmp_path):
    made(tmp_path / "a"), made(tmp_path / "b"), (tmp_path / "c").mkdir()
    with pytest.raises(
        CheckpointError,
        match=r"latest is missing or unreadable; pass one of the tags that exist: a, b",
    ):
        find.locate(tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"no checkpoint 'c' in .*c/manifest.json does not exist; pass one of the "
        r"tags that exist: a, b",
    ):
        find.locate(tmp_path, "c")
    with pytest.raises(CheckpointError, match="there is no checkpoint of hf-zero in it"):
        find.locate(tmp_path / "c")
    with pytest.raises(
        CheckpointError,
        match="there is no such folder; pass the folder that was given to save_checkpoint",
    ):
        find_checkpoint(tmp_path / "nothing")


def test_latest_that_points_outside(tmp_path):
    made(tmp_path / "outside")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest").write_text("../outside")
    with pytest.raises(CheckpointError, match="cannot be a tag"):
        find.locate(tmp_path / "run")


def test_a_save_stopped_between_its_renames(tmp_path):
    """The checkpoint that was moved aside is found, and put back by the next save of the tag."""
    old = made(tmp_path / ".hf-zero-replaced-a", "old")
    (tmp_path / "latest").write_text("a")
    assert find.locate(tmp_path) == old
    commit.begin_folder(tmp_path, "a", ID)
    assert (tmp_path / "a" / MANIFEST_NAME).read_text() == "old"
    assert not old.exists()


def test_a_save_stopped_before_it_dropped_the_old_one(tmp_path):
    made(tmp_path / ".hf-zero-replaced-a", "old"), made(tmp_path / "a", "new")
    (tmp_path / ".hf-zero-replaced-a" / "notes.txt").write_text("mine")
    (tmp_path / "latest").write_text("a")
    assert find.locate(tmp_path) == tmp_path / "a"
    commit.begin_folder(tmp_path, "a", ID)
    assert (tmp_path / "a" / MANIFEST_NAME).read_text() == "new"
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"
    assert not (tmp_path / ".hf-zero-replaced-a").exists()


def test_leftovers_of_the_same_tag_go_and_of_others_are_named(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("hf_zero.logging.logger.propagate", True)
    (tmp_path / ".hf-zero-saving-a.76543210" / "deep").mkdir(parents=True)
    (tmp_path / ".hf-zero-saving-a").mkdir()
    other = tmp_path / ".hf-zero-saving-a.b.76543210"
    other.mkdir()
    assert list(commit.begin_folder(tmp_path, "a", ID).iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f".hf-zero-saving-a.{ID[:8]}",
        other.name,
    ]
    assert f"{other} was left by an interrupted save" in caplog.text


def test_a_checkpoint_that_is_replaced_is_named(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("hf_zero.logging.logger.propagate", True)
    with caplog.at_level("INFO", "hf_zero"):
        commit.begin_folder(tmp_path, "a", ID)
        assert caplog.text == ""
        made(tmp_path / "a", "old")
        commit.begin_folder(tmp_path, "a", ID)
    said = f"the checkpoint 'a' in {tmp_path} is replaced; another tag or folder keeps it"
    assert {*caplog.messages} == {said}


def test_a_folder_of_somebody_else_is_not_replaced(tmp_path):
    (tmp_path / "a").mkdir()
    commit.begin_folder(tmp_path, "a", ID)
    (tmp_path / "a" / "thesis.tex").write_text("years of work")
    with pytest.raises(
        CheckpointError, match="exists and is no checkpoint of hf-zero; move it away"
    ):
        commit.begin_folder(tmp_path, "a", ID)


def test_a_rename_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    made(tmp_path / "a", "old")
    temporary = made(tmp_path / ".hf-zero-saving-a", "new")
    rename = find.os.rename

    def failing(source, target):
        if source == temporary:
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(find.os, "rename", failing)
    with pytest.raises(OSError):
        commit.publish_folder(temporary, "a")
    assert (tmp_path / "a" / MANIFEST_NAME).read_text() == "old"


def test_folders_of_runs_below_are_named(tmp_path):
    """Accelerate's save_state writes one folder below the path that the user passes."""
    for name in ("step_20", "step_40"):
        made(tmp_path / name / "global_step1")
    (tmp_path / "logs").mkdir()
    with pytest.raises(
        CheckpointError, match=r"its folders step_20, step_40 hold checkpoints; pass one of them"
    ):
        find.locate(tmp_path)


def test_a_rank_still_at_work_puts_nothing_into_a_save_that_is_given_up(tmp_path, monkeypatch):
    save = commit_target(tmp_path, "t" * find.LONGEST_TAG, ID)
    save.begin()
    save.path_of("rank-0").write_bytes(b"0")
    late, rmdir = [], os.rmdir

    def meanwhile(*args, **kwargs):
        try:
            save.path_of("rank-1").write_bytes(b"1")
        except FileNotFoundError as error:
            late.append(error)
        rmdir(*args, **kwargs)

    monkeypatch.setattr(os, "rmdir", meanwhile)
    save.abort()
    assert list(tmp_path.iterdir()) == [] and len(late) == 1
    save.abort()  # nothing is left to remove


def test_a_save_is_given_up_where_nothing_can_be_renamed(tmp_path, monkeypatch):
    save = commit_target(tmp_path, "a", ID)
    save.begin()
    save.path_of("rank-0").write_bytes(b"0")

    def rename(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "rename", rename)
    save.abort()
    assert list(tmp_path.iterdir()) == []
