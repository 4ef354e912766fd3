"""One conversion at a time into a folder.

The lock is the system's, on a file in the folder: it ends with the process that holds it.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hf_zero.checkpoint import folders
from hf_zero.errors import CheckpointError

LOCK = folders.NEW + "lock"
# of file systems that know no locks: nobody is kept out there
WITHOUT = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold ``folder``.

    Raises CheckpointError if another conversion, of this process or another one, holds it.
    """
    descriptor = _locked(folder)
    try:
        yield
    finally:
        try:
            with suppress(FileNotFoundError):
                os.unlink(folder / LOCK)
        finally:
            os.close(descriptor)


def _locked(folder: Path) -> int:
    while True:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise CheckpointError(
                f"{folder} is being written by another conversion; wait until it ends, or "
                "choose another folder"
            ) from error
        except OSError as error:
            if error.errno not in WITHOUT:
                os.close(descriptor)
                raise
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # the one that held it has ended meanwhile, and has removed this file
