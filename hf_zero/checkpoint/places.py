"""Where checkpoints lie: folders of this machine as paths, object stores by their URLs through
fsspec; ranges read from either.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from hf_zero.errors import CheckpointError

Place = Any
"""A ``pathlib.Path``, or a ``upath.UPath`` of an object store.

Both have the methods of the former that read.
"""

BLOCK = 16 << 20  # bytes read at a time
PART = 8 << 20  # bytes of one request to an object store
REQUESTS = 8  # under way at a time

_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_CUT_URL = re.compile(r"[a-z][a-z0-9+.-]+:/[^/]")


def place(where: Any) -> Place:
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


def _of_url(text: str) -> Place:
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


def is_remote(where: Place) -> bool:
    """Whether ``where`` is in an object store."""
    return not isinstance(where, Path)


def on_this_machine(where: Any, what: str) -> Path:
    """``where`` as a path.

    Raises CheckpointError, saying ``what`` has to be on a file system, if it is in an object store.
    """
    found = place(where)
    if is_remote(found):
        raise CheckpointError(
            f"{found}: {what} must be a folder of a file system; write it there and "
            "copy it to the store"
        )
    return found


def modified(where: Place) -> int:
    """When a file was written, in nanoseconds."""
    if not is_remote(where):
        return int(where.stat().st_mtime_ns)
    with store_errors(where):
        return int(where.fs.modified(where.path).timestamp() * 1e9)


@contextmanager
def store_errors(where: Place) -> Iterator[None]:
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


class Ranges(Protocol):
    """A file from which ranges of bytes are read, from several threads."""

    size: int

    def read(self, view: memoryview, at: int) -> int:
        """Fill ``view`` with what stands at byte ``at``; the bytes that were there, fewer if the
        file ends. Raises OSError.
        """
        ...

    def close(self) -> None: ...


def open_ranges(where: Place) -> Ranges:
    """Raises OSError."""
    return _Object(where) if is_remote(where) else _File(where)


def read_all(fd: int, data: memoryview, at: int) -> int:
    """``os.preadv`` from ``at`` on until ``data`` is full, ``BLOCK`` bytes at a time; the bytes
    that were there, fewer if the file ends.
    """
    taken = 0
    while taken < len(data) and (count := os.preadv(fd, [data[taken : taken + BLOCK]], at + taken)):
        taken += count
    return taken


class _File:
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


class _Object:
    def __init__(self, where: Place) -> None:
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
