"""Checkpoints in an object store: a folder is what its objects' names begin with, and nothing is
renamed (FORMAT.md section 10).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from fnmatch import fnmatch
from types import TracebackType
from typing import Any

from hf_zero.checkpoint import folders
from hf_zero.checkpoint.manifest import MANIFEST_NAME, Manifest
from hf_zero.checkpoint.places import PART, Place, store_errors
from hf_zero.errors import CheckpointError
from hf_zero.logs import logger

PARTS = 9_000  # of an object at most; S3 takes 10,000


def put(where: Place, content: bytes) -> None:
    """Put a small object, whole or not at all. Raises OSError."""
    with store_errors(where):
        where.fs.pipe_file(where.path, content)


class Upload:
    """A new object of ``size`` bytes, sent in parts from its start to its end; it is there once
    :meth:`flush` has returned.
    """

    def __init__(self, where: Place, size: int) -> None:
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
            # the upload has failed already, and that is what is to be told
            logger.warning(
                "the parts of %s that were sent may be left in the store: %s", self._where, trouble
            )
        with suppress(AttributeError):  # a file in memory has nothing to send
            self._file.closed = True  # or the collector would send what is left of it


def begin(final: Place) -> None:
    """Remove what interrupted saves left in ``final``.

    Raises CheckpointError if something lies there that is none of ours.
    """
    held = _held(final)
    if held and not any(_is_own(item) for item in held):
        raise CheckpointError(
            f"{final} holds {held[0].name} and is no checkpoint of hf-zero; move it away or save "
            "under another tag, so that nothing is lost"
        )
    remove_unlisted(final)


def remove_unlisted(final: Place) -> None:
    """Remove rank files and the like that the manifest in ``final`` does not list: all of them
    where there is none.
    """
    manifest = final / MANIFEST_NAME
    try:
        listed = (
            {entry.name for entry in Manifest.read(manifest).all_files()}
            if manifest.is_file()
            else set()
        )
    except CheckpointError:
        return  # which files are its own is not known any more
    remove(
        item
        for item in _held(final)
        if _is_own(item) and item.name != MANIFEST_NAME and item.name not in listed
    )


def abandon(final: Place, mark: str) -> None:
    """Remove the files whose names end on ``mark``."""
    try:
        remove(item for item in _held(final) if item.stem.endswith(f"-{mark}"))
    except Exception as error:
        logger.warning(
            "files of a save that failed are left in %s; the next save of this "
            "tag removes them (%s)",
            final,
            error,
        )


def drop(folder: Place) -> None:
    """Remove the checkpoint in ``folder``, its manifest first: at no moment a half of it can be
    taken for one. Raises OSError.
    """
    remove([folder / MANIFEST_NAME])
    remove(_held(folder))


def remove(chosen: Iterable[Place]) -> None:
    for item in chosen:
        with store_errors(item):
            item.fs.rm_file(item.path)


def _held(folder: Place) -> list[Place]:
    """The objects directly in ``folder``."""
    with store_errors(folder):
        found = folder.iterdir() if folder.is_dir() else ()
        return sorted((item for item in found if item.is_file()), key=lambda item: item.name)


def _is_own(item: Place) -> bool:
    stem, _, suffix = folders.OBJECTS_NAME.rpartition(".")
    return (
        item.name == MANIFEST_NAME
        or fnmatch(item.name, folders.RANK_PATTERN)
        or (item.name.startswith(f"{stem}-") and item.suffix == f".{suffix}")
    )
