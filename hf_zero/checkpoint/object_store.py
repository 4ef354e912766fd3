"""Objects of a store that fsspec opens: put at once or in parts, listed, removed."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from hf_zero.checkpoint.storage import PART, AnyPath, store_errors
from hf_zero.logging import logger

MOST_PARTS = 9_000  # most parts of an object; S3 accepts 10,000


def put_object(where: AnyPath, content: bytes) -> None:
    """Put a small object, atomically. Raises OSError."""
    with store_errors(where):
        where.fs.pipe_file(where.path, content)


class Upload:
    """A new object of ``size`` bytes, sent in parts from start to end. It exists once :meth:`flush`
    has returned.
    """

    def __init__(self, where: AnyPath, size: int) -> None:
        self._where, self._sent = where, False
        with store_errors(where):
            self._file: Any = where.fs.open(
                where.path, "wb", block_size=max(2 * PART, -(-size // MOST_PARTS))
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

    def __exit__(self, *raised: object) -> None:
        if self._sent:
            return
        try:
            self._file.discard()
        except Exception as trouble:
            # the upload has already failed with another error, which is the one to raise
            logger.warning(
                "the parts of %s that were sent may be left in the store: %s", self._where, trouble
            )
        with suppress(AttributeError):  # a file in memory has nothing to send
            self._file.closed = True  # else garbage collection would send the rest


def remove_objects(chosen: Iterable[AnyPath]) -> None:
    """Remove the objects ``chosen``. Raises OSError for the first that cannot be removed."""
    for item in chosen:
        with store_errors(item):
            item.fs.rm_file(item.path)


def objects_in(folder: AnyPath) -> list[AnyPath]:
    """Return the objects directly in ``folder``, by name."""
    with store_errors(folder):
        items = folder.iterdir() if folder.is_dir() else ()
        return sorted((item for item in items if item.is_file()), key=lambda item: item.name)
