"""Folders of this user's jobs on one host, in memory that outlives a process where there is some,
and the identity of a job.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from hf_zero.checkpoint.file_lock import FileLock
from hf_zero.errors import CheckpointError

SHARED_MEMORY = Path("/dev/shm")
MOUNTS, TMPFS = Path("/proc/mounts"), "tmpfs"
ESCAPED = re.compile(r"\\([0-7]{3})")  # a space or a backslash in a mount point
CLAIM_SECONDS = 10.0  # seconds in which a process that is ending gives up its claim


def is_in_memory(folder: Path) -> bool:
    """Return whether ``folder``, or its nearest existing parent, is on a file system in memory."""
    try:
        mounts = MOUNTS.read_text().splitlines()
    except OSError:
        return False
    file_systems = dict[str, str]()
    for line in mounts:  # the last mount on a point is the visible one
        _, point, name, *_ = line.split(" ")
        file_systems[ESCAPED.sub(lambda match: chr(int(match[1], 8)), point)] = name
    real = os.path.realpath(folder)
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
