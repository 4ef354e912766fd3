"""This rank's extents in files on one or several paths.

[Note: files without names]
A rank has one file on each path, and unlinks it as soon as it is open. So nothing is left behind
however the process ends, no later run can mistake it for its own, and a directory that is removed
or made read-only in mid-run changes nothing. The space shows in ``df``, not in ``du`` (``lsof +L1``
lists it). Only a kill between creating and unlinking a file can leave a name, of a file that is
still empty and no longer locked: the next run on that path removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_zero.errors import ConfigError, DiskSpaceError, OffloadError
from hf_zero.logging import logger
from hf_zero.ops.files import (
    ALIGNMENT,
    FileQueue,
    OpenFile,
    Priority,
    Ticket,
    TransferPart,
    open_direct,
)

PREFIX = "hf-zero-offload-"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_GB = 1e9


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _no_space(path: str, needed: int, free: int, name: str, number: int) -> DiskSpaceError:
    why = "RLIMIT_FSIZE (ulimit -f) forbids it"
    if number != errno.EFBIG:
        why = f"{free / _GB:.3f} GB are free"
    return DiskSpaceError(
        number,
        f"{needed / _GB:.3f} GB more are needed for {name}, and {why}; free some, or name "
        "further paths in nvme_path",
        path,
    )


def remove_leftovers(path: str) -> list[str]:
    """Remove files that killed runs have left at ``path``; return their names.

    Files of living processes are locked, and not empty.
    """
    removed = []
    with os.scandir(path) as entries:
        names = [
            entry.path
            for entry in entries
            if entry.name.startswith(PREFIX) and entry.is_file(follow_symlinks=False)
        ]
    for name in names:
        with contextlib.suppress(OSError):  # gone meanwhile, locked, or another user's
            descriptor = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_size == 0:
                    os.unlink(name)
                    removed.append(name)
            finally:
                os.close(descriptor)
    return removed


def _nameless_file(path: str, rank: int) -> OpenFile:
    """Create a file on the file system of ``path``, open and without a name (see the note)."""
    while True:
        descriptor, name = tempfile.mkstemp(
            prefix=f"{PREFIX}{socket.gethostname()}-{os.getpid()}-rank{rank}-", dir=path
        )
        # on a file system without locks no other run can lock it either, and so none removes it
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # another rank removed it as a leftover before it was locked
        if os.fstat(descriptor).st_nlink == 0:
            os.close(descriptor)
            continue
        try:
            direct = open_direct(name)
        except OSError:
            os.close(descriptor)
            raise
        finally:
            os.unlink(name)
        return OpenFile(name, descriptor, direct)


@dataclass(frozen=True)
class _PendingTransfer:
    start: int
    stop: int
    write: bool
    ticket: Ticket


class FileExtent:
    """``nbytes`` bytes of the files, as one range; initially zero.

    Requests for bytes that overlap take effect in the order they were made, whatever their
    priorities.
    """

    def __init__(self, files: NvmeFiles, name: str, start: int, nbytes: int):
        self.name = name
        self.nbytes = nbytes
        self._files = files
        self._start = start
        self._pending: list[_PendingTransfer] = []

    def read(self, offset: int, out: torch.Tensor, priority: Priority = Priority.NEEDED) -> Ticket:
        """Fill ``out`` (CPU, contiguous) from byte ``offset`` of the extent.

        The ticket's ``wait`` raises OSError.
        """
        return self._move(False, offset, out, priority)

    def write(
        self, offset: int, data: torch.Tensor, priority: Priority = Priority.BEHIND
    ) -> Ticket:
        """Write ``data`` (CPU, contiguous, not to be changed until done) at byte ``offset``.

        The ticket's ``wait`` raises OSError.
        """
        return self._move(True, offset, data, priority)

    def _move(self, write: bool, offset: int, tensor: torch.Tensor, priority: Priority) -> Ticket:
        stop = offset + tensor.nbytes
        if offset < 0 or stop > self.nbytes:
            raise OffloadError(
                f"bytes {offset} to {stop} were asked of extent {self.name!r}, which has "
                f"{self.nbytes}; allocate a larger one"
            )
        with self._files.lock:
            # A failed write stays in the list, so that reads of its range fail too, until another
            # write covers it.
            self._pending = [
                other
                for other in self._pending
                if not other.ticket.done()
                or (
                    other.ticket.failed()
                    and other.write
                    and not (write and offset <= other.start and other.stop <= stop)
                )
            ]
            after = [
                other.ticket
                for other in self._pending
                if (write or other.write) and other.start < stop and offset < other.stop
            ]
            ticket = self._files.move(
                write, self._start + offset, tensor, priority, after, self.name
            )
            self._pending.append(_PendingTransfer(offset, stop, write, ticket))
        return ticket


class NvmeFiles:
    """This rank's files: extents are allocated once and then read and written through one queue.

    paths: directories that exist and are writable. With several, blocks of ``block_size`` bytes are
    striped over them. rank: for the names of files and messages. block_size, queue_depth, threads:
    as in ``FileQueue``; several paths share the queue.

    Raises ConfigError for a path that cannot be used and DiskSpaceError if there is not enough
    room. A failure in mid-run is an OSError of the ticket: other extents are unchanged, and the
    data to be written is still in the caller's memory.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        rank: int = 0,
        block_size: int = 1 << 20,
        queue_depth: int = 32,
        threads: int = 8,
    ):
        if not paths:
            raise ConfigError(
                "offloading to nvme needs nvme_path: at least one directory on the disk"
            )
        self.paths = [os.fspath(path) for path in paths]
        self.rank = rank
        self.lock = threading.RLock()
        self._stripe = block_size
        self._used = 0
        self._extents: dict[str, FileExtent] = {}
        self._files = [self._open(path) for path in self.paths]
        self._sizes = [0] * len(self._files)
        self._queue = FileQueue(block_size, queue_depth, threads)
        self._warned: set[str] = set()
        self.warn_of_buffering()

    def _open(self, path: str) -> OpenFile:
        if not os.path.isdir(path):
            raise ConfigError(
                f"nvme_path {path!r} is not a directory here; make it, or check "
                "that the disk is mounted"
            )
        try:
            for name in remove_leftovers(path):
                logger.info("removed %s, which a run that was killed had left", name)
            return _nameless_file(path, self.rank)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise ConfigError(
                    f"nvme_path {path!r} cannot be written by this user ({error.strerror}); change "
                    "its mode, or name another"
                ) from error
            if error.errno in _NO_ROOM:
                raise _no_space(path, 0, 0, "a file", error.errno) from error
            raise

    def warn_of_buffering(self) -> None:
        """Warn once of each path whose file system refused O_DIRECT, at open or in a transfer."""
        for path, file in zip(self.paths, self._files):
            if not file.direct and path not in self._warned:
                self._warned.add(path)
                logger.warning(
                    "the file system of nvme_path %s takes no O_DIRECT: transfers go "
                    "through the page cache",
                    path,
                )

    def reserve(self, nbytes: int) -> None:
        """Reserve room for further extents of ``nbytes`` bytes in all, or raise DiskSpaceError."""
        self._grow(self._used + nbytes, f"{nbytes} bytes of offloaded state of rank {self.rank}")

    def allocate(self, name: str, nbytes: int) -> FileExtent:
        """Allocate an extent. Raises DiskSpaceError with the path, bytes needed and free."""
        with self.lock:
            self._check_open()
            if name in self._extents or nbytes < 0:
                raise OffloadError(
                    f"extent {name!r} of {nbytes} bytes: names must differ and sizes be 0 or "
                    "more; allocate each once"
                )
            self._grow(self._used + nbytes, f"{name!r} of rank {self.rank}")
            extent = FileExtent(self, name, self._used, nbytes)
            self._used = _round_up(self._used + nbytes, ALIGNMENT)
            self._extents[name] = extent
        return extent

    def _grow(self, end: int, name: str) -> None:
        stripes, paths = -(-end // self._stripe), len(self._files)
        for index, (path, file) in enumerate(zip(self.paths, self._files)):
            share = (stripes - index + paths - 1) // paths * self._stripe
            if paths == 1:
                share = _round_up(end, ALIGNMENT)
            have = self._sizes[index]
            if share <= have:
                continue
            state = os.fstatvfs(file.descriptor)
            free = state.f_bavail * state.f_frsize
            if share - have > free:
                raise _no_space(path, share - have, free, name, errno.ENOSPC)
            try:
                os.posix_fallocate(file.descriptor, have, share - have)
            except OSError as error:
                os.ftruncate(file.descriptor, have)
                if error.errno in _NO_ROOM:
                    raise _no_space(path, share - have, free, name, error.errno) from error
                raise OSError(
                    error.errno, f"{error.strerror} (taking {share - have} bytes for {name})", path
                ) from error
            self._sizes[index] = share

    def _pieces(self, start: int, nbytes: int) -> list[TransferPart]:
        if len(self._files) == 1:
            return [TransferPart(self._files[0], start, 0, nbytes)]
        pieces, at = [], 0
        while at < nbytes:
            stripe, within = divmod(start + at, self._stripe)
            length = min(self._stripe - within, nbytes - at)
            row, path = divmod(stripe, len(self._files))
            pieces.append(TransferPart(self._files[path], row * self._stripe + within, at, length))
            at += length
        return pieces

    def move(
        self,
        write: bool,
        start: int,
        tensor: torch.Tensor,
        priority: Priority,
        after: Sequence[Ticket],
        name: str,
    ) -> Ticket:
        """Transfer an extent's bytes, which begin at ``start`` of the files. For ``FileExtent``."""
        self._check_open()
        state = "its values are still in memory" if write else "what it holds was not changed"
        context = f" for {name!r} of rank {self.rank}; {state}, and other extents are untouched"
        return self._queue.transfer(
            write, self._pieces(start, tensor.nbytes), tensor, priority, after, context, name
        )

    def _check_open(self) -> None:
        if not self._files:
            raise OffloadError(
                f"the offloaded files of rank {self.rank} are closed; the engine that "
                "held them was destroyed"
            )

    def close(self) -> None:
        """Release the disk space.

        Transfers in progress end first, queued ones are dropped. May be called again.
        """
        self._queue.close(cancel=True)
        with self.lock:
            self._files = []
            self._sizes = []
            self._extents.clear()
