"""Where the files of one save go, and how they become a checkpoint all at once: by a rename, or
by a manifest that comes last.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hf_zero.checkpoint import folders, objectstore
from hf_zero.checkpoint.manifest import MANIFEST_NAME, Manifest
from hf_zero.checkpoint.places import Place, is_remote, store_errors
from hf_zero.errors import CheckpointError


class Landing(ABC):
    """The save of checkpoint ``tag`` in ``directory``: ``final`` is its folder.

    Rank 0 calls all methods, the others ``file`` alone.
    """

    def __init__(self, directory: Place, tag: str, save_id: str) -> None:
        self.directory, self.tag, self.save_id = directory, tag, save_id
        self.final = directory / tag

    @abstractmethod
    def begin(self) -> None:
        """Make the place ready, after mending what an interrupted save left.

        Raises CheckpointError where something else stands.
        """

    def named(self, name: str) -> str:
        """The name that the file ``name`` of this save gets."""
        return name

    @abstractmethod
    def file(self, name: str) -> Place:
        """Where this save writes its file ``name``."""

    def _check_written(self, manifest: Manifest) -> None:
        """Raises CheckpointError or OSError if what the ranks have written is not all there."""
        for entry in manifest.all_files():
            path = self.file(entry.name)
            with store_errors(path):
                found = path.stat().st_size
            if found != entry.size:
                raise CheckpointError(
                    f"{path} has {found} bytes, {entry.size} were written; check the storage, and "
                    "that nobody else changes this folder"
                )

    @abstractmethod
    def publish(
        self, manifest: Manifest, files: Mapping[str, bytes], above: Mapping[str, bytes]
    ) -> None:
        """Write ``files`` beside those of the ranks, and the manifest: the checkpoint is there.

        ``above``: what :meth:`announce` needs.
        """

    @abstractmethod
    def announce(self, above: Mapping[str, bytes]) -> None:
        """Put the files ``above``, ``latest`` last, into the directory, and let the checkpoint
        go that this one replaced.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Remove what this save has written. Raises nothing."""


def landing(directory: Place, tag: str, save_id: str) -> Landing:
    return (Objects if is_remote(directory) else Folder)(directory, tag, save_id)


class Folder(Landing):
    """A folder of a file system, which has a temporary name until it is whole (FORMAT.md section
    6).
    """

    directory: Path
    final: Path

    def __init__(self, directory: Path, tag: str, save_id: str) -> None:
        # a thread may write when the working folder is another
        super().__init__(directory.absolute(), tag, save_id)
        self._temporary = folders.temporary_folder(self.directory, tag, save_id)

    def begin(self) -> None:
        folders.begin(self.directory, self.tag, self.save_id)

    def file(self, name: str) -> Path:
        return self._temporary / name

    def publish(
        self, manifest: Manifest, files: Mapping[str, bytes], above: Mapping[str, bytes]
    ) -> None:
        for name, content in files.items():
            folders.write_file(self.file(name), content)
        # Written with the others, moved by announce: a disk that fills up is found out before
        # anything has changed.
        for name, content in above.items():
            folders.write_file(self.file(folders.NEW + name), content)
        folders.write_file(self.file(MANIFEST_NAME), manifest.dumps())
        self._check_written(Manifest.read(self.file(MANIFEST_NAME)))
        folders.publish(self._temporary, self.tag)

    def announce(self, above: Mapping[str, bytes]) -> None:
        for name in above:
            os.replace(self.final / (folders.NEW + name), self.directory / name)
        folders.fsync_folder(self.directory)
        folders.discard_replaced(self.final)

    def abandon(self) -> None:
        # Under another name first: a rank that is still at work cannot put a file into what is
        # being removed.
        written = self._temporary
        with suppress(OSError):
            written = written.rename(self.directory / (folders.DROPPED + self.save_id))
        shutil.rmtree(written, ignore_errors=True)


class Objects(Landing):
    """Objects of a store, which are a checkpoint once their manifest is there (FORMAT.md section
    10).
    """

    def begin(self) -> None:
        objectstore.begin(self.final)

    def named(self, name: str) -> str:
        stem, dot, suffix = name.rpartition(".")
        return f"{stem}-{self.save_id[:12]}{dot}{suffix}"

    def file(self, name: str) -> Place:
        return self.final / name

    def publish(
        self, manifest: Manifest, files: Mapping[str, bytes], above: Mapping[str, bytes]
    ) -> None:
        for name, content in files.items():
            objectstore.put(self.file(name), content)
        content = manifest.dumps()
        # what cannot be read is not put
        self._check_written(Manifest.parse(content, self.file(MANIFEST_NAME)))
        objectstore.put(self.file(MANIFEST_NAME), content)

    def announce(self, above: Mapping[str, bytes]) -> None:
        for name, content in above.items():
            objectstore.put(self.directory / name, content)
        objectstore.remove_unlisted(self.final)

    def abandon(self) -> None:
        objectstore.abandon(self.final, self.save_id[:12])
