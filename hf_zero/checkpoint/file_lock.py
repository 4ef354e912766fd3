"""Locks of living processes on files, whose holder may remove or rename the file.

[Note: a lock on a file without its name]
A process opens the file, then locks it. In between, or while it waits, the holder may remove or
rename the file: the lock that it then gets excludes nobody, since the next process makes a new file
of that name. So whoever has locked compares the locked file with the one of that name; and a folder
is removed or renamed only under its lock, never after the lock was given up.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
import weakref
from contextlib import suppress
from pathlib import Path

from hf_zero.errors import CheckpointError

# errors of file systems without locks
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)  # of a link, a folder, a socket
PAUSE_SECONDS = 0.05
_open: set[int] = set()  # descriptors of the locks of this process


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

    def rename(self, name: str) -> None:
        """Rename the locked file, in its folder."""
        self.path = self.path.rename(self.path.with_name(name))

    def remove(self) -> None:
        """Remove the file, then give up the lock. Other holders of a shared lock may do so, too."""
        try:
            if self.is_current():
                with suppress(FileNotFoundError):
                    os.unlink(self.path)
        finally:
            self.close()


def _take(descriptor: int, how: int, seconds: float | None) -> None:
    """Lock the file, for which other holders are awaited for ``seconds``."""
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
    """Close, in a forked child, the locks of its parent, which would outlive that."""
    for descriptor in _open:
        os.close(descriptor)
    _open.clear()


os.register_at_fork(after_in_child=_close_inherited)
