"""The saves of the living engines of a host, by which a save recognizes a checkpoint of another
running job.

[Note: proof of life]
A save that replaces the checkpoint of another running job loses that job's work, and one that only
seems to must not end a healthy run. A lock in the folder of a run is no proof: over a network it
may outlive its host, so that a restart on another one would be refused; a trainer removes folders
of checkpoints, which NFS refuses while a file in them is open; and several engines may save there
in turn. So each engine notes its saves in a file of this host, locked until the engine is destroyed
or its process ends, and only a save in a file that another job has locked is a proof. A copy of a
run has the ids of its checkpoints, so their places are noted, too. Jobs on other hosts, and in
containers without the memory or the folder of temporary files of this one, are not seen.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hf_zero.checkpoint.commit import Save, SavesOfHost
from hf_zero.checkpoint.file_lock import FileLock
from hf_zero.checkpoint.host_folders import (
    CLAIM_SECONDS,
    bases,
    job_identity,
    lock_in,
    refuse_foreign,
)
from hf_zero.errors import CheckpointError
from hf_zero.logging import logger, parse_json

FOLDER = "hf-zero-saves"
HIDDEN = "."  # before the name of a file that is being made


@dataclass(frozen=True)
class Writer:
    """A job that has written a checkpoint, and the process of its rank 0."""

    job: str
    host: str
    pid: int

    def __str__(self) -> str:
        return f"the job {self.job} (pid {self.pid} on {self.host})"


class SaveLog(SavesOfHost):
    """The saves of one engine, from the first one on until :meth:`close`, or until the engine or
    its process ends, and those of others.
    """

    def __init__(self) -> None:
        self._lock: FileLock | None = None
        self._failed = False

    def note(self, save: Save) -> None:
        """Add a save. A host without a place for the file is logged once."""
        try:
            if self._lock is None and not self._failed:
                name = secrets.token_hex(8)
                self._lock = lock_in(_folder(), HIDDEN + name, fcntl.LOCK_EX, CLAIM_SECONDS)
                writer = Writer(_job(), socket.gethostname(), os.getpid())
                self._lock.path.write_text(json.dumps(vars(writer)) + "\n")
                # Seen once it is locked: others remove a file that nobody has locked.
                self._lock.rename(name)
            if self._lock is not None:
                with open(self._lock.path, "a") as file:
                    file.write(json.dumps(save) + "\n")
        except (CheckpointError, OSError) as error:
            self.close()
            self._failed = True
            logger.warning("other jobs on this host cannot notice saves of this one: %s", error)

    def others(self) -> dict[Save, Writer]:
        """Return the saves, and their writers; remove the files of processes that have ended."""
        found: dict[Save, Writer] = {}
        try:
            refuse_foreign(_folder())
            for path in _folder().glob(f"[!{HIDDEN}]*"):
                if _is_locked(path):
                    writer, saves = _read(path)
                    if writer is not None and not _is_related(writer):
                        found |= dict.fromkeys(saves, writer)
        except (CheckpointError, OSError) as error:
            logger.debug("other jobs on this host are not looked for: %s", error)
        return found

    def close(self) -> None:
        if self._lock is not None:
            self._lock.remove()
            self._lock = None


def _is_locked(path: Path) -> bool:
    """Return whether the engine of a file lives. Otherwise, remove the file."""
    try:
        FileLock(path, fcntl.LOCK_SH).remove()
    except BlockingIOError:
        return True
    return False


def _read(path: Path) -> tuple[Writer | None, list[Save]]:
    """Return the writer and the saves in a file; no writer if its process is about to write it, or
    has just removed it.
    """
    try:
        head, *saves = map(parse_json, path.read_text().splitlines())
        return Writer(**head), [(save_id, place) for save_id, place in saves]
    except (OSError, TypeError, ValueError):
        return None, []


def _is_related(writer: Writer) -> bool:
    """Return whether ``writer`` is of this job, this process, or one that has started it; also if
    the system does not tell.
    """
    import psutil

    try:
        started_by = [os.getpid(), *(each.pid for each in psutil.Process().parents())]
    except psutil.Error:
        return True
    return writer.job == _job() or writer.pid in started_by


def _folder() -> Path:
    return bases(None)[0] / f"{FOLDER}-{os.getuid()}"


@cache
def _job() -> str:
    return job_identity(None)[0]
