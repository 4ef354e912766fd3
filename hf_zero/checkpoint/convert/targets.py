"""Target folders of conversions: refused where writing could destroy something, locked, named once
they are complete; and their files before they have their names.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from hf_zero.checkpoint import find
from hf_zero.checkpoint.file_lock import FileLock
from hf_zero.checkpoint.storage import AnyPath, fsync_path, is_remote, make_folder, rename_durably
from hf_zero.errors import CheckpointError
from hf_zero.logging import logger

LOCK = find.NEW + "lock"


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder`` for the ``with`` block.

    Raises CheckpointError if another conversion, in this or another process, holds it. On a file
    system without locks, other processes are not kept out, as a warning says.
    """
    try:
        lock = lock_if_supported(lambda: FileLock.on_current(folder / LOCK, fcntl.LOCK_EX))
    except BlockingIOError as error:
        raise CheckpointError(
            f"{folder} is being written by another conversion; wait until it ends, or "
            "choose another folder"
        ) from error
    try:
        yield
    finally:
        if lock is not None:
            lock.remove()


def lock_if_supported(take: Callable[[], FileLock]) -> FileLock | None:
    """Return the lock that ``take`` returns; None, with a warning, on a file system without locks:
    there, every conversion goes on without one.
    """
    try:
        return take()
    except CheckpointError as error:
        logger.warning("%s; this conversion goes on without a lock", error)
        return None


def refuse_link(folder: Path) -> None:
    """Raise CheckpointError if ``folder``, to be written to, is a link."""
    if folder.is_symlink():
        raise CheckpointError(
            f"{folder} is a link to {os.readlink(folder)}, and no link is written through; name "
            "the folder that it leads to, or a new one"
        )


def refuse_target(target: Path, source: AnyPath, may_hold: bool = False) -> None:
    """Raise CheckpointError for a ``target`` that is a link, that is the checkpoint ``source`` or
    is in it, or that holds it, unless it ``may_hold`` it.
    """
    refuse_link(target)
    if is_remote(source):
        return
    to, read = target.resolve(), source.resolve()
    how = "is" if to == read else "is in" if to.is_relative_to(read) else ""
    if not how and not may_hold and read.is_relative_to(to):
        how = "holds"
    if how:
        raise CheckpointError(
            f"{target} {how} the checkpoint that is read, {source}; name another folder, such as a "
            "new one beside it"
        )


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder that is renamed to ``target`` if the ``with`` block succeeds, once all
    in it is on the device, else removed. Raises CheckpointError if ``target`` exists and is not an
    empty folder.
    """
    target = Path(os.path.abspath(target))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists; remove it, or name another folder")
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    make_folder(unfinished)
    try:
        yield unfinished
        for path in (*unfinished.rglob("*"), unfinished):
            fsync_path(path)
        rename_durably(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def torch_save(value: object, path: Path) -> None:
    """Write ``value`` with torch.save. Raises OSError if the file cannot be written."""
    with open(path, "wb") as file:
        try:
            torch.save(value, file)
        except RuntimeError as error:
            raise file_error(error) from None


def file_error(error: BaseException) -> BaseException:
    """Return the OSError of the file behind an error of torch, which ends its archive while the
    former is raised, and fails again; ``error`` itself if there is none.
    """
    return error.__context__ if isinstance(error.__context__, OSError) else error


def temporary_path(target: Path, name: str) -> Path:
    """Return the path at which the file ``name`` of ``target`` is written until it is complete."""
    return (target / name).with_name(find.NEW + Path(name).name)


def remove_irregular(files: Iterable[Path]) -> None:
    """Remove links, pipes and devices in place of ``files``, which are to be written: a link leads
    elsewhere, and a pipe is waited for.
    """
    for path in files:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            path.unlink()
