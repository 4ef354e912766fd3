"""Folders of generations: one a job, host and engine, in memory that outlives the process; their
job's identity, and folders that other jobs have left.

::

    <base>/hf-zero-<uid>-<job>/<host>/engine-0/slot-0/rank-00000-of-00004.safetensors
                                                      rank-00000-of-00004.json
                                               slot-1/...
                                               resume/                 what a load reads
                                               ranks/2-6f1c            a process that may yet fail
                                     claim     locked by a process of the engine
                              in-use           locked by the processes of the job

[Note: the end of a job]
Jobs of one name may follow each other so closely that one ends while the next begins. A process
that ends gives up its claim and its mark, removes its own file in ``ranks``, and then renames the
engine's folder only if no file is left there and it gets the claim, and removes it under its new
name: a job that begins in the middle of a removal would else claim the rest of a folder. Under the
mark, exclusively, it removes the parents that are empty. Whoever ends last gets both, unless the
next job has them: then the folders are that one's. ``kernels/cpu/exits.cpp`` does the same at an
exit code of 0.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hf_zero.checkpoint.file_lock import FileLock
from hf_zero.checkpoint.host_folders import CLAIM_SECONDS, is_in_memory, lock_in, refuse_foreign
from hf_zero.device.host_limits import free_ram
from hf_zero.errors import CheckpointError

PREFIX = "hf-zero-"
IN_USE = "in-use"
CLAIM = "claim"
REMOVED = "~"  # in the name of a job's folder that is being removed: no job has such a name
MOMENT = 0.2  # seconds in which a process that looks whether a folder is empty is done
SLOTS = ("slot-0", "slot-1")
RESUME = "resume"
RANKS = "ranks"
PROCESS = secrets.token_hex(8)  # of files in RANKS: the next job's ranks have the same numbers


def job_folder(base: Path, job: str) -> Path:
    return base / f"{PREFIX}{os.getuid()}-{job}"


class InUse:
    """A mark on a job's folder, made if it is missing, as long as this process lives or until
    :meth:`close`. Raises CheckpointError like :func:`refuse_foreign`.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = lock_in(folder, IN_USE, fcntl.LOCK_SH, None)

    def is_current(self) -> bool:
        """Return whether the marked folder has not been removed since."""
        return self._lock.is_current()

    def close(self) -> None:
        self._lock.close()


class Claim(InUse):
    """The claim of this process on the ``folder`` of an engine, made if it is missing, as long as
    it lives or until :meth:`close`. Processes that it forks do not inherit it. A later one of this
    process replaces it.

    Raises CheckpointError if another living process has claimed the folder.
    """

    def __init__(self, folder: Path) -> None:
        former = _claims.get(folder)
        if former is not None:  # of an engine that nobody has destroyed
            former.close()
        try:
            self._lock = lock_in(folder, CLAIM, fcntl.LOCK_EX, CLAIM_SECONDS)
        except BlockingIOError as error:
            raise CheckpointError(
                f"another job that is running saves into {folder}: both have the same name; name "
                "each of them (checkpoint.memory.job)"
            ) from error
        _claims[folder] = self


_claims: weakref.WeakValueDictionary[Path, Claim] = weakref.WeakValueDictionary()


def is_in_use(folder: Path) -> bool:
    """Return whether a living process has marked the job's ``folder``."""
    if not os.path.lexists(folder / IN_USE):
        return False
    try:
        FileLock(folder / IN_USE, fcntl.LOCK_EX).close()
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass  # removed meanwhile
    return False


@dataclass(frozen=True)
class Left:
    """A job's folder: its bytes, the time of its last change (seconds since the epoch), and whether
    a process uses it.
    """

    folder: Path
    nbytes: int
    changed: float
    in_use: bool


def jobs_in(base: Path) -> Iterator[Left]:
    """Yield the folders of this user's jobs in ``base``, by name. Those of its name that are links
    or another user's are skipped.
    """
    for folder in sorted(base.glob(f"{PREFIX}{os.getuid()}-*")):
        try:
            refuse_foreign(folder)
        except CheckpointError:
            continue
        if not folder.is_dir():
            continue
        files = list(_files_in(folder))
        try:
            changed = max((status.st_mtime for status in files), default=folder.stat().st_mtime)
        except FileNotFoundError:
            continue  # removed meanwhile
        yield Left(folder, sum(status.st_size for status in files), changed, is_in_use(folder))


def _files_in(folder: Path) -> Iterator[os.stat_result]:
    """Yield the status of each file below ``folder``, which other processes may remove meanwhile. A
    link that a resume has made is none.
    """
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                status = os.lstat(os.path.join(parent, name))
                if stat.S_ISREG(status.st_mode):
                    yield status


def remove_job(folder: Path) -> bool:
    """Remove a job's ``folder`` unless a process uses it; return whether it was removed."""
    try:
        lock = FileLock.on_current(folder / IN_USE, fcntl.LOCK_EX)
    except (BlockingIOError, FileNotFoundError):
        return False
    try:
        away = folder.with_name(f"{folder.name}{REMOVED}{secrets.token_hex(4)}")
        folder.rename(away)  # a job that begins now makes the folder anew
    except OSError:  # by another process, too
        return False
    finally:
        lock.close()
    shutil.rmtree(away, ignore_errors=True)  # another process may remove it, too
    return not away.exists()


def rank_mark(folder: Path, rank: int) -> Path:
    """Return the file of ``rank``, in this process, in an engine's ``folder``."""
    return folder / RANKS / f"{rank}-{PROCESS}"


def enter(folder: Path, rank: int) -> None:
    """Have an engine's ``folder``, if there is one, stay until ``rank`` calls :func:`release`."""
    while folder.is_dir():
        with suppress(FileNotFoundError):  # each round, another process has removed the folder
            (folder / RANKS).mkdir(exist_ok=True)
            rank_mark(folder, rank).touch()
            return


def forget_ranks(folder: Path) -> None:
    """Remove the files of ranks of an attempt before from an engine's ``folder``, which is claimed;
    one of them that ends now removes its own.
    """
    shutil.rmtree(folder / RANKS, ignore_errors=True)


def release(folder: Path, top: Path, rank: int) -> None:
    """Remove an engine's ``folder``, and its parents up to ``top`` that are then empty, if only the
    process of ``rank`` keeps it, and none has claimed it since (see the note).
    """
    rank_mark(folder, rank).unlink(missing_ok=True)
    with suppress(OSError):  # the next job has claimed it, or another rank has removed it
        if not is_kept(folder):
            claim = FileLock.on_current(folder / CLAIM, fcntl.LOCK_EX)
            if not is_kept(folder):
                folder.rename(f"{folder}{REMOVED}{rank_mark(folder, rank).name}")
            claim.close()
    with suppress(OSError):  # another rank has removed the last of them
        for away in folder.parent.glob(f"{folder.name}{REMOVED}*"):  # of a killed process, too
            shutil.rmtree(away, ignore_errors=True)
    with suppress(OSError):  # another process has marked it, or it is not empty, or gone
        mark = FileLock.on_current(top / IN_USE, fcntl.LOCK_EX, MOMENT)
        remove_empty(folder.parent, top)
        mark.close()


def is_kept(folder: Path) -> bool:
    """Return whether a process keeps an engine's ``folder``."""
    ranks = folder / RANKS
    return ranks.exists() and bool(os.listdir(ranks))


def remove_empty(folder: Path, top: Path) -> None:
    """Remove ``folder`` and its parents up to ``top``, which may hold the mark. Raises OSError for
    the first that holds anything else.
    """
    while folder != top:
        with suppress(FileNotFoundError):  # removed by another host that has the same folder
            folder.rmdir()
        folder = folder.parent
    if os.listdir(top) == [IN_USE]:
        (top / IN_USE).unlink()
        top.rmdir()


def free(base: Path) -> int:
    """Return the bytes free in ``base``, in memory also under the limits of this process."""
    existing = next(path for path in (base, *base.parents) if path.exists())
    nbytes = shutil.disk_usage(existing).free
    return min(nbytes, free_ram().nbytes) if is_in_memory(existing) else nbytes


def capacity(base: Path, folder: Path) -> int:
    """Return the bytes that ``folder``, below ``base``, may come to: those that are :func:`free`
    there, and those that it has already.
    """
    return free(base) + sum(status.st_size for status in _files_in(folder))
