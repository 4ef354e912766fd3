"""Locks on files that their holders remove, for processes that share a folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from hf_zero.checkpoint import file_lock
from hf_zero.checkpoint.file_lock import FileLock
from hf_zero.errors import CheckpointError


def free(path: Path, how: int = fcntl.LOCK_EX) -> bool:
    try:
        FileLock(path, how).close()
    except BlockingIOError:
        return False
    return True


def test_one_holder_excludes_others_until_it_closes(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = FileLock(path, fcntl.LOCK_SH)
    assert free(path, fcntl.LOCK_SH) and not free(path)
    first.close()
    first.close()
    second = FileLock(path, fcntl.LOCK_EX, seconds=None)
    assert not free(path, fcntl.LOCK_SH)
    del second
    assert free(path)


@pytest.mark.parametrize("how", ["removed", "renamed", "made again"])
def test_a_lock_is_taken_on_the_file_of_that_name(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder before removes or renames the file between another's open and lock."""
    path, flock = tmp_path / "lock", fcntl.flock
    calls: list[int] = []

    def late(descriptor: int, flags: int) -> None:
        if not calls:
            path.rename(tmp_path / "away") if how == "renamed" else path.unlink()
            if how == "made again":
                path.touch()
        calls.append(descriptor)
        flock(descriptor, flags)

    monkeypatch.setattr(fcntl, "flock", late)
    assert not FileLock(path, fcntl.LOCK_EX).is_current()
    calls.clear()
    lock = FileLock.on_current(path, fcntl.LOCK_EX)
    monkeypatch.undo()
    assert len(calls) == 2 and lock.is_current() and not free(path)
    lock.remove()
    assert not path.exists()


def test_a_file_is_removed_while_its_lock_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the file that goes may be the one that another process has just made and locked."""
    path, unlink, removed = tmp_path / "lock", os.unlink, list[Path]()

    def remove(given: Path) -> None:
        with pytest.raises(BlockingIOError):
            FileLock(path, fcntl.LOCK_EX)
        removed.append(given)
        unlink(given)

    monkeypatch.setattr(os, "unlink", remove)
    FileLock(path, fcntl.LOCK_EX).remove()
    assert removed == [path] and not path.exists()


def test_two_holders_of_a_shared_lock_remove_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (FileLock(tmp_path / "lock", fcntl.LOCK_SH) for _ in range(2))
    monkeypatch.setattr(second, "is_current", lambda: True)  # looked just before the other removed
    first.remove()
    second.remove()
    assert not (tmp_path / "lock").exists()


def test_a_forked_process_does_not_hold_the_lock(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock", fcntl.LOCK_EX)
    (ready, forked), (end, ends) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ends)
        os.write(forked, b"1")
        os.read(end, 1)  # until the test has ended
        os._exit(0)
    os.read(ready, 1)
    lock.close()
    try:
        assert free(tmp_path / "lock")
    finally:
        os.close(ends)
        os.waitpid(child, 0)
        for descriptor in (ready, forked, end):
            os.close(descriptor)


@pytest.mark.parametrize("code", file_lock.NO_LOCKS)
def test_a_file_system_without_locks_is_named(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(CheckpointError, match=f"{tmp_path} is on a file system without locks"):
        FileLock(tmp_path / "lock", fcntl.LOCK_EX)
    assert not list(tmp_path.iterdir())
