"""The two kinds of storage: folders of this machine as paths, object stores by their URLs through
fsspec. Ranges are read from either; small files are written so that they are on the device.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from hf_zero.errors import CheckpointError
from hf_zero.logging import logger

AnyPath = Any
"""A ``pathlib.Path``, or a ``upath.UPath`` of an object store.

Both have the methods of the former that read.
"""

BLOCK = 16 << 20  # bytes read at a time
PART = 8 << 20  # bytes of one request to an object store
REQUESTS = 8  # under way at a time

_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_CUT_URL = re.compile(r"[a-z][a-z0-9+.-]+:/[^/]")


Opened = TypeVar("Opened", bound="ClosedAtExit")


class ClosedAtExit:
    """What a ``with`` block gives, and closes at its end."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self: Opened) -> Opened:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def as_path(where: Any) -> AnyPath:
    """The place that a user names: a path, a URL that fsspec knows (``s3://bucket/run``,
    ``file:///…``), or a ``UPath``.

    Raises CheckpointError for a URL that no installed package opens, and for one that was made a
    ``Path``.
    """
    if not isinstance(where, (str, os.PathLike)):
        if hasattr(where, "fs") and hasattr(where, "storage_options"):
            return where
        raise CheckpointError(
            f"{where!r} of type {type(where).__name__} is no place for checkpoints; "
            "pass a path or a URL"
        )
    text = os.fspath(where)
    if isinstance(text, str) and _URL.match(text):
        return _of_url(text)
    path = Path(os.fsdecode(text))
    if _CUT_URL.match(str(path)) and not path.exists():
        raise CheckpointError(
            f"{path} looks like a URL that was made a path, which lost a slash; "
            "pass the URL as a string"
        )
    return path


def _of_url(text: str) -> AnyPath:
    from upath import UPath

    try:
        # Other ranks and other jobs write too: what was listed once may not be kept.
        found = UPath(text, use_listings_cache=False)
        local = found.protocol in ("file", "local")
        found.fs  # noqa: B018  the package that speaks to this store is imported here
    except (ImportError, ValueError) as error:
        raise CheckpointError(
            f"{text} cannot be opened: {error}; install the package of fsspec "
            "for it, or pass a path"
        ) from error
    return Path(found.path) if local else found


def is_remote(where: AnyPath) -> bool:
    """Whether ``where`` is in an object store."""
    return not isinstance(where, Path)


def local_path(where: Any, what: str) -> Path:
    """``where`` as a path.

    Raises CheckpointError, saying ``what`` has to be on a file system, if it is in an object store.
    """
    found = as_path(where)
    if is_remote(found):
        raise CheckpointError(
            f"{found}: {what} must be a folder of a file system; write it there and "
            "copy it to the store"
        )
    return found


def modified_ns(where: AnyPath) -> int:
    """When a file was written, in nanoseconds."""
    if not is_remote(where):
        return int(where.stat().st_mtime_ns)
    with store_errors(where):
        return int(where.fs.modified(where.path).timestamp() * 1e9)


@contextmanager
def store_errors(where: AnyPath) -> Iterator[None]:
    """What a store's package raises in it, whatever its class, is an OSError that names
    ``where``.
    """
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
    """A file from which ranges of bytes are read, from several threads; ``at_once`` bytes of a
    read are worth a call of their own.
    """

    size: int
    at_once: int

    def read(self, view: memoryview, at: int) -> int:
        """Fill ``view`` with what stands at byte ``at``; the bytes that were there, fewer if the
        file ends. Raises OSError.
        """
        ...

    def close(self) -> None: ...


def open_ranges(where: AnyPath) -> RangeReader:
    """Raises OSError."""
    return _ObjectRanges(where) if is_remote(where) else _LocalRanges(where)


def read_all(fd: int, data: memoryview, at: int) -> int:
    """``os.preadv`` from ``at`` on until ``data`` is full, ``BLOCK`` bytes at a time; the bytes
    that were there, fewer if the file ends.
    """
    taken = 0
    while taken < len(data) and (count := os.preadv(fd, [data[taken : taken + BLOCK]], at + taken)):
        taken += count
    return taken


class _LocalRanges:
    at_once = 4 << 20  # what is read is still in the caches when it is hashed

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY)
        try:
            self.size = os.fstat(self._fd).st_size
        except BaseException:
            os.close(self._fd)
            raise

    def read(self, view: memoryview, at: int) -> int:
        return read_all(self._fd, view, at)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _ObjectRanges:
    at_once = PART * REQUESTS

    def __init__(self, where: AnyPath) -> None:
        self._where = where
        with store_errors(where):
            self.size = int(where.stat().st_size)

    def read(self, view: memoryview, at: int) -> int:
        """``REQUESTS`` ranges of ``PART`` bytes at a time."""
        taken, wanted = 0, min(len(view), max(0, self.size - at))
        while taken < wanted:
            starts = range(at + taken, at + min(wanted, taken + PART * REQUESTS), PART)
            ends = [min(start + PART, at + wanted) for start in starts]
            with store_errors(self._where):
                parts = self._where.fs.cat_ranges(
                    [self._where.path] * len(starts), list(starts), ends, on_error="raise"
                )
            for part, start, end in zip(parts, starts, ends):
                view[taken : taken + len(part)] = part
                taken += len(part)
                if len(part) < end - start:  # another object has come in its place
                    return taken
        return taken

    def close(self) -> None:
        pass


def write_all(fd: int, data: memoryview, at: int | None = None) -> None:
    """``os.write`` (or, given a position, ``os.pwrite``) until every byte is taken."""
    while len(data):
        taken = os.write(fd, data) if at is None else os.pwrite(fd, data, at)
        data = data[taken:]
        at = None if at is None else at + taken


def rename_durably(source: Path, target: Path) -> None:
    """Rename ``source``, and flush the folders that change."""
    os.rename(source, target)
    fsync_folder(source.parent)
    if target.parent != source.parent:
        fsync_folder(target.parent)


def remove_tree(folder: Path) -> None:
    """Remove ``folder`` if it is there; of a link the link alone."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def make_folder(path: Path) -> None:
    """Make ``path`` and what is missing above it; each new name is flushed to the device."""
    missing = [path]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for folder in reversed(missing):
        if not folder.is_dir():
            folder.mkdir(exist_ok=True)
            fsync_folder(folder.parent)


def write_file(path: Path, content: bytes) -> None:
    """Write a small file and flush it to the device."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        write_all(fd, memoryview(content))
        os.fsync(fd)
    except OSError as error:
        # a full disk is met by a write, which knows a number only
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(fd)


def fsync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


PARTS = 9_000  # of an object at most; S3 takes 10,000


def put_object(where: AnyPath, content: bytes) -> None:
    """Put a small object, whole or not at all. Raises OSError."""
    with store_errors(where):
        where.fs.pipe_file(where.path, content)


class Upload:
    """A new object of ``size`` bytes, sent in parts from its start to its end; it is there once
    :meth:`flush` has returned.
    """

    def __init__(self, where: AnyPath, size: int) -> None:
        self._where, self._sent = where, False
        with store_errors(where):
            self._file: Any = where.fs.open(
                where.path, "wb", block_size=max(2 * PART, -(-size // PARTS))
            )

    def write(self, data: memoryview) -> None:
        with store_errors(self._where):
            self._file.write(data)

    def flush(self) -> None:
        with store_errors(self._where):
            self._file.close()
        self._sent = True

    def __enter__(self) -> Upload:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._sent:
            return
        try:
            self._file.discard()
        except Exception as trouble:
            # the upload has failed already, and that is the error to raise
            logger.warning(
                "the parts of %s that were sent may be left in the store: %s", self._where, trouble
            )
        with suppress(AttributeError):  # a file in memory has nothing to send
            self._file.closed = True  # or the collector would send what is left of it


def remove_objects(chosen: Iterable[AnyPath]) -> None:
    for item in chosen:
        with store_errors(item):
            item.fs.rm_file(item.path)


def objects_in(folder: AnyPath) -> list[AnyPath]:
    """The objects directly in ``folder``."""
    with store_errors(folder):
        found = folder.iterdir() if folder.is_dir() else ()
        return sorted((item for item in found if item.is_file()), key=lambda item: item.name)
