"""Folders of this user's jobs on one host, in memory that outlives a process where there is some,
locks of living processes in them, and the saves of each engine, by which a save recognizes a
checkpoint of another running job.

[Note: a lock on a file without its name]
A process opens the file, then locks it. In between, or while it waits, the holder may remove or
rename the file: the lock that it then gets excludes nobody, since the next process makes a new file
of that name. So whoever has locked compares the locked file with the one of that name; and a folder
is removed or renamed only under its lock, never after the lock was given up.

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

import errno
import fcntl
import json
import os
import re
import secrets
import socket
import stat
import tempfile
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from hf_zero.checkpoint.commit import Save, SavesOfHost
from hf_zero.errors import CheckpointError
from hf_zero.logging import logger, parse_json

SHARED_MEMORY = Path("/dev/shm")
TMPFS = "tmpfs"
CLAIM_SECONDS = 10.0  # seconds in which a process that is ending gives up its claim
# errors of file systems without locks
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)  # of a link, a folder, a socket
PAUSE_SECONDS = 0.05
_open: set[int] = set()


class FileLock:
    """A lock of this process on the file ``path``, made if it is missing, until :meth:`close`, or
    until this object or the process ends. Forked processes do not inherit it.

    how: ``fcntl.LOCK_EX`` or ``fcntl.LOCK_SH``. seconds: the wait for other holders; None: until
    they have ended.

    Raises BlockingIOError if another holder stays, CheckpointError on a file system without locks
    and where ``path`` is no regular file (a link would be written through), and FileNotFoundError
    if the folder is missing.
    """

    def __init__(self, path: Path, how: int, seconds: float | None = 0.0) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            if error.errno not in NO_FILE:
                raise
            raise CheckpointError(f"{path} is no regular file; remove it") from error
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise CheckpointError(f"{path} is no regular file; remove it")
            _take(descriptor, how, seconds)
        except BaseException as error:
            os.close(descriptor)
            if not isinstance(error, OSError) or error.errno not in NO_LOCKS:
                raise
            with suppress(FileNotFoundError):
                os.unlink(path)
            raise CheckpointError(
                f"{path.parent} is on a file system without locks ({error.strerror}), and other "
                "processes could change the folder at the same time; name a folder on another one"
            ) from error
        self._descriptor = descriptor
        _open.add(descriptor)
        self.close = weakref.finalize(self, _close, descriptor)

    @classmethod
    def on_current(cls, path: Path, how: int, seconds: float | None = 0.0) -> FileLock:
        """Return a lock on the file that has the name ``path`` once it is held (see the note)."""
        while True:
            lock, current = cls(path, how, seconds), False
            try:
                current = lock.is_current()
            finally:
                if not current:  # another process has removed the file, or it cannot be looked at
                    lock.close()
            if current:
                return lock

    def is_current(self) -> bool:
        """Return whether the locked file still has its name."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.lstat(self.path))
        except FileNotFoundError:
            return False

    def remove(self) -> None:
        """Remove the file, then give up the lock. Other holders of a shared lock may do so, too."""
        try:
            if self.is_current():
                with suppress(FileNotFoundError):
                    os.unlink(self.path)
        finally:
            self.close()


def _take(descriptor: int, how: int, seconds: float | None) -> None:
    if seconds is None:
        fcntl.flock(descriptor, how)
        return
    limit = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= limit:
                raise
        time.sleep(PAUSE_SECONDS)


def _close(descriptor: int) -> None:
    if descriptor in _open:
        _open.remove(descriptor)
        os.close(descriptor)


def _close_inherited() -> None:
    for descriptor in _open:
        os.close(descriptor)
    _open.clear()


os.register_at_fork(after_in_child=_close_inherited)


def is_in_memory(folder: Path) -> bool:
    """Return whether ``folder``, or its nearest existing parent, is on a file system in memory."""
    try:
        mounts = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return False
    real = os.path.realpath(folder)
    file_systems = {
        point: name for _, point, name, *_ in (line.split(" ") for line in mounts)
    }  # the last mount on a point is the visible one
    while real not in file_systems and real != "/":
        real = os.path.dirname(real)
    return file_systems.get(real) == TMPFS


def bases(folder: str | None) -> list[Path]:
    """Return the folders that may hold jobs' folders, the preferred one first: the configured
    ``folder``, else /dev/shm if it is a writable tmpfs, and the folder of temporary files.
    """
    if folder is not None:
        return [Path(folder).absolute()]
    memory = is_in_memory(SHARED_MEMORY) and os.access(SHARED_MEMORY, os.W_OK | os.X_OK)
    return [*([SHARED_MEMORY] if memory else []), Path(tempfile.gettempdir())]


def plain(name: str) -> str:
    """Return ``name`` as one path component, with a part of its hash if that changes or cuts it:
    different names stay different.
    """
    component = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:100]
    if component == name:
        return name
    digest = sha256(name.encode(errors="surrogateescape")).hexdigest()
    return f"{component or 'unnamed'}-{digest[:8]}"


def job_identity(job: str | None) -> tuple[str, bool]:
    """Return the identity of this process's job, and whether its restarts keep that: the
    configured ``job``, SLURM's job, torchrun's run, the launcher's process, or this process alone.
    """
    import psutil

    if job is not None:
        return plain(job), True
    if os.environ.get("SLURM_JOB_ID"):
        return plain(f"slurm-{os.environ['SLURM_JOB_ID']}"), True
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if run != "none":
        return plain(f"run-{run}"), True
    launched = "RANK" in os.environ
    pid = os.getppid() if launched else os.getpid()
    try:
        begun = int(psutil.Process(pid).create_time() * 1000)
    except psutil.Error:
        begun = 0
    return f"{'launcher' if launched else 'process'}-{pid}-{begun}", launched


def make_own(folder: Path) -> None:
    """Make a job's ``folder`` if it is missing, for this user alone. Raises CheckpointError like
    :func:`refuse_foreign`.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    refuse_foreign(folder)


def refuse_foreign(folder: Path) -> None:
    """Raise CheckpointError if a job's ``folder`` is there and is a link or another user's: in
    /dev/shm anyone may make one of its name first, and put files there that this job would load.
    """
    try:
        status = os.lstat(folder)
    except FileNotFoundError:
        return
    if stat.S_ISLNK(status.st_mode) or status.st_uid != os.getuid():
        what = "a link" if stat.S_ISLNK(status.st_mode) else f"of the user {status.st_uid}"
        raise CheckpointError(
            f"{folder} is {what}, and nothing is read or written there; have it removed, or name "
            "the job (checkpoint.memory.job) or another folder (checkpoint.memory.folder)"
        )


def lock_in(folder: Path, name: str, how: int, seconds: float | None) -> FileLock:
    """Return a lock on the file ``name`` of ``folder``, both made if they are missing."""
    while True:
        make_own(folder)
        with suppress(FileNotFoundError):  # each round, another process has removed the folder
            return FileLock.on_current(folder / name, how, seconds)


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
                self._lock.path = self._lock.path.rename(self._lock.path.with_name(name))
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
