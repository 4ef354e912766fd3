"""Storage of checkpoints: local folders as paths, object stores as URLs through fsspec; byte ranges
of files in either; small local files that are flushed to the device, and renames and removals.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import re
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hf_zero.errors import CheckpointError
from hf_zero.logging import logger

AnyPath = Any
"""A ``pathlib.Path``, or a ``upath.UPath`` of an object store.

Both have the methods of the former that read.
"""

BLOCK = 16 << 20  # bytes read at a time
PART = 8 << 20  # bytes of one request to an object store
REQUESTS = 8  # concurrent requests to an object store

_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_CUT_URL = re.compile(r"[a-z][a-z0-9+.-]+:/[^/]")


Opened = TypeVar("Opened", bound="ClosedAtExit")


class ClosedAtExit:
    """Context manager that closes itself at the end of its ``with`` block."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self: Opened) -> Opened:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def as_path(where: object) -> AnyPath:
    """Return the path for a place that a user names: a path, a URL that fsspec knows
    (``s3://bucket/run``, ``file:///…``), or a ``UPath``.

    Raises CheckpointError for a URL that no installed package opens, for one that was turned into
    a ``Path``, and for a path that no file system can have.
    """
    if not isinstance(where, (str, os.PathLike)):
        if hasattr(where, "fs") and hasattr(where, "storage_options"):
            return where
        raise CheckpointError(
            f"{where!r} of type {type(where).__name__} is not a place for checkpoints; "
            "pass a path or a URL"
        )
    text = os.fspath(where)
    if isinstance(text, str) and _URL.match(text):
        return _of_url(text)
    path = Path(os.fsdecode(text))
    try:
        is_name = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise CheckpointError(
            f"{str(path)!r} cannot be the name of a folder; pass one without NUL that can be "
            "written as UTF-8"
        )
    if _CUT_URL.match(str(path)) and not path.exists():
        raise CheckpointError(
            f"{path} looks like a URL that was made a path, which lost a slash; "
            "pass the URL as a string"
        )
    return path


def _of_url(text: str) -> AnyPath:
    try:
        from upath import UPath

        # Other ranks and jobs write too, so listings must not be cached.
        path = UPath(text, use_listings_cache=False)
        local = path.protocol in ("file", "local")
        path.fs  # noqa: B018  imports the package for this store
    except (ImportError, ValueError) as error:
        raise CheckpointError(
            f"{text} cannot be opened: {error}; pip install 'hf-zero[remote]' and fsspec's package "
            "for this store, or pass a path"
        ) from error
    return Path(path.path) if local else path


def is_remote(where: AnyPath) -> bool:
    """Return whether ``where`` is in an object store."""
    return not isinstance(where, Path)


def place_of(where: object) -> str:
    """Return the text that names ``where`` however it is given: relative or by links, too."""
    path = as_path(where)
    return str(path if is_remote(path) else path.resolve())


def local_path(where: object, what: str) -> Path:
    """Return ``where`` as a local path.

    Raises CheckpointError if it is in an object store; ``what`` is named as what must be local.
    """
    path = as_path(where)
    if is_remote(path):
        raise CheckpointError(
            f"{path}: {what} must be a folder of a file system; write it there and "
            "copy it to the store"
        )
    return Path(path)


def modified_ns(where: AnyPath) -> int:
    """Return the modification time of a file in nanoseconds."""
    if not is_remote(where):
        return int(where.stat().st_mtime_ns)
    with store_errors(where):
        return int(where.fs.modified(where.path).timestamp() * 1e9)


@contextmanager
def store_errors(where: AnyPath) -> Iterator[None]:
    """Convert any exception of a store's package into an OSError that names ``where``."""
    try:
        yield
    except (OSError, CheckpointError) as error:
        if isinstance(error, OSError) and error.filename is None:
            text = error.strerror or str(error) or type(error).__name__
            error.filename, error.strerror = str(where), text
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", str(where)) from error


class RangeReader(Protocol):
    """A file from which several threads can read byte ranges. A read of ``at_once`` bytes is large
    enough to be efficient.
    """

    size: int
    at_once: int

    def read(self, view: memoryview, at: int) -> int:
        """Fill ``view`` with the bytes from ``at`` on. Returns the number of bytes read, fewer than
        asked for if the file ends. Raises OSError.
        """

    def close(self) -> None: ...


def open_ranges(where: AnyPath) -> RangeReader:
    """Open a file for reading ranges. Raises OSError."""
    return _ObjectRanges(where) if is_remote(where) else _LocalRanges(where)


def read_all(fd: int, data: memoryview, at: int) -> int:
    """Call ``os.preadv`` from ``at`` on until ``data`` is full, ``BLOCK`` bytes at a time. Returns
    the number of bytes read, fewer than asked for if the file ends.
    """
    taken = 0
    while taken < len(data) and (count := os.preadv(fd, [data[taken : taken + BLOCK]], at + taken)):
        taken += count
    return taken


class _LocalRanges:
    at_once = 4 << 20  # small enough to be still in the CPU caches when it is hashed

    def __init__(self, path: Path) -> None:
        self._path, self._fd = path, os.open(path, os.O_RDONLY)
        # closes the file of tensors that were to be read later and are dropped, which nobody closes
        self._unclosed = weakref.finalize(self, os.close, self._fd)
        self.size = os.fstat(self._fd).st_size

    def read(self, view: memoryview, at: int) -> int:
        return read_all(self._fd, view, at)

    def close(self) -> None:
        """Close the file, once. An error is logged: it changes nothing of what was read, and raised
        on one rank it would part that rank from the others.
        """
        fd, self._fd = self._fd, -1
        try:
            if self._unclosed.detach():
                os.close(fd)
        except OSError as error:
            logger.warning("%s was read, but could not be closed: %s", self._path, error.strerror)


class _ObjectRanges:
    at_once = PART * REQUESTS

    def __init__(self, where: AnyPath) -> None:
        self._where = where
        with store_errors(where):
            self.size = int(where.stat().st_size)

    def read(self, view: memoryview, at: int) -> int:
        """Read ``REQUESTS`` ranges of ``PART`` bytes at a time."""
        taken, count = 0, min(len(view), max(0, self.size - at))
        while taken < count:
            starts = range(at + taken, at + min(count, taken + PART * REQUESTS), PART)
            ends = [min(start + PART, at + count) for start in starts]
            with store_errors(self._where):
                parts = self._where.fs.cat_ranges(
                    [self._where.path] * len(starts), list(starts), ends, on_error="raise"
                )
            for part, start, end in zip(parts, starts, ends):
                view[taken : taken + len(part)] = part
                taken += len(part)
                if len(part) < end - start:  # the object was replaced by a shorter one
                    return taken
        return taken

    def close(self) -> None:
        pass


def write_all(fd: int, data: memoryview, at: int | None = None) -> None:
    """Call ``os.write`` (``os.pwrite`` if ``at`` is given) until all of ``data`` is written."""
    while len(data):
        taken = os.write(fd, data) if at is None else os.pwrite(fd, data, at)
        data = data[taken:]
        at = None if at is None else at + taken


AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h
# errors of kernels, file systems and containers without the call
NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


def exchange(first: Path, second: Path) -> bool:
    """Exchange two existing files or folders in one step. Returns False, with no effect, where the
    system has no such call. Raises OSError.
    """
    call = _renameat2()
    paths = os.fsencode(first), os.fsencode(second)
    if call is None:
        return False
    if call(AT_FDCWD, paths[0], AT_FDCWD, paths[1], RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))


@functools.cache
def _renameat2() -> Callable[..., int] | None:
    """Return the function of the C library, None if it has none."""
    return getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


def rename_durably(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target``, and flush the folders that change."""
    os.rename(source, target)
    fsync_path(source.parent)
    if target.parent != source.parent:
        fsync_path(target.parent)


def remove_tree(folder: Path) -> None:
    """Remove ``folder`` if it exists; if it is a link, only the link."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def make_folder(path: Path) -> None:
    """Make ``path`` and its missing parents, and flush each new name to the device."""
    missing = [path]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for folder in reversed(missing):
        if not folder.is_dir():
            folder.mkdir(exist_ok=True)
            fsync_path(folder.parent)


def write_file(path: Path, content: bytes) -> None:
    """Write a small file and flush it to the device."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        write_all(fd, memoryview(content))
        os.fsync(fd)
    except OSError as error:
        # A write that meets a full disk knows the descriptor only, not the path.
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(fd)


def fsync_path(path: Path) -> None:
    """Flush a file, or the names in a folder, to the device."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
