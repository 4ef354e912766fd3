"""Target of one save: where its files are written, and how they become a checkpoint in a folder or
an object store, in place of the one that had its tag.
"""

from __future__ import annotations

import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from hf_zero.checkpoint import object_store, storage
from hf_zero.checkpoint.find import (
    DROPPED,
    NEW,
    OBJECTS_NAME,
    RANK_PATTERN,
    REPLACED,
    RESERVED,
    SAVING,
    is_checkpoint,
)
from hf_zero.checkpoint.manifest import MANIFEST_NAME, Manifest
from hf_zero.checkpoint.manifest_reading import parse_manifest, read_manifest
from hf_zero.checkpoint.object_store import objects_in, remove_objects
from hf_zero.checkpoint.storage import AnyPath, is_remote, make_folder, store_errors
from hf_zero.errors import CheckpointError
from hf_zero.logging import logger

Save = tuple[str, str]  # id, and the path of the checkpoint


class SavesOfHost:
    """The saves of the running jobs of this host, those of one engine among them: none are known
    without a feature that notes them.
    """

    def note(self, save: Save) -> None:
        """Add a save of this engine."""

    def others(self) -> Mapping[Save, object]:
        """Return the saves of other running jobs, and what wrote them."""
        return {}

    def close(self) -> None:
        """Withdraw the saves of this engine."""


class CommitTarget(ABC):
    """Target of the save of checkpoint ``tag`` in ``directory``; ``final`` is the checkpoint's
    folder.

    Rank 0 calls all methods, the other ranks only ``file_name`` and ``path_of``.
    """

    def __init__(self, directory: AnyPath, tag: str, save_id: str) -> None:
        self.directory, self.tag, self.save_id = directory, tag, save_id
        self.final = directory / tag
        self.others: Mapping[Save, object] = {}

    def refuse_others(self, others: Mapping[Save, object]) -> None:
        """Raise CheckpointError if this save would replace a checkpoint of ``others``: saves of
        other running jobs, by id and place, and their jobs. The number of checkpoints to keep does
        not count these.
        """
        self.others, path = others, canonical_path(self.final)
        replaced = self._replaced_ids() if others else []
        for (save_id, place), writer in others.items():
            if place == path and save_id.startswith(tuple(replaced)):
                raise CheckpointError(
                    f"{self.final} was written by {writer}, which still runs, and would be "
                    "replaced; pass another folder or tag, or end that job"
                )

    def _replaced_ids(self) -> list[str]:
        """Return the ids, or their first digits, of saves that :meth:`prepare` or
        :meth:`publish` would remove.
        """
        return list(filter(None, [save_id_in(self.final)]))

    @abstractmethod
    def prepare(self) -> None:
        """Repair what an interrupted save left, and make the target ready.

        Raises CheckpointError if the place is taken by something that is not a checkpoint.
        """

    def file_name(self, name: str) -> str:
        """Return the name under which this save stores its file ``name``."""
        return name

    @abstractmethod
    def path_of(self, name: str) -> AnyPath:
        """Return the path to which this save writes its file ``name``."""

    def _check_written(self, manifest: Manifest) -> None:
        """Raise CheckpointError or OSError if a listed file is missing or has another size."""
        for entry in manifest.all_files():
            path = self.path_of(entry.name)
            with store_errors(path):
                size = path.stat().st_size
            if size != entry.size:
                raise CheckpointError(
                    f"{path} has {size} bytes, {entry.size} were written; check the storage, and "
                    "that no other process changes this folder"
                )

    @abstractmethod
    def publish(
        self, manifest: Manifest, files: Mapping[str, bytes], above: Mapping[str, bytes]
    ) -> None:
        """Write ``files`` next to the rank files, then the manifest. This makes the checkpoint.

        ``above``: the files that :meth:`finish` puts into the directory above.
        """

    @abstractmethod
    def finish(self, above: Mapping[str, bytes]) -> None:
        """Put the files ``above`` into the directory, ``latest`` last, and remove the checkpoint
        that this one replaced.
        """

    @abstractmethod
    def abort(self) -> None:
        """Remove what this save has written. Never raises."""


def commit_target(directory: AnyPath, tag: str, save_id: str) -> CommitTarget:
    return (ObjectStoreTarget if is_remote(directory) else FolderTarget)(directory, tag, save_id)


class FolderTarget(CommitTarget):
    """Target in a file system: a folder with a temporary name until it is complete (FORMAT.md
    section 6).
    """

    directory: Path
    final: Path

    def __init__(self, directory: Path, tag: str, save_id: str) -> None:
        # A background thread may write after the process has changed its working directory.
        super().__init__(directory.absolute(), tag, save_id)
        # unique per save, so that two jobs never write into one folder
        self._temporary = self.directory / f"{SAVING}{tag}.{save_id[:8]}"
        self._replaced = self.directory / (REPLACED + tag)

    def prepare(self) -> None:
        final, directory = self.final, self.directory
        make_folder(directory)
        for dropped in directory.glob(f"{DROPPED}*"):
            shutil.rmtree(dropped, ignore_errors=True)
        replaces = is_checkpoint(final)
        if os.path.lexists(final) and not replaces and (not final.is_dir() or any(final.iterdir())):
            raise CheckpointError(
                f"{final} exists and is no checkpoint of hf-zero; move it away or save under "
                "another tag, so that nothing is lost"
            )
        if replaces:
            _log_replacing(final)
        if self._replaced.exists():
            if replaces:
                discard_replaced(final)
            else:
                os.rename(self._replaced, final)
        for other in directory.glob(f"{SAVING}*"):
            if _save_of(self.tag).fullmatch(other.name):
                storage.remove_tree(other)
            else:
                logger.warning(
                    "%s was left by an interrupted save, or another job saves into the same "
                    "folder; delete it if no other job is saving here",
                    other,
                )
        self._temporary.mkdir()

    def _replaced_ids(self) -> list[str]:
        saves = [_save_of(self.tag).fullmatch(e.name) for e in self.directory.glob(f"{SAVING}*")]
        return super()._replaced_ids() + [save[1] for save in saves if save and save[1]]

    def path_of(self, name: str) -> Path:
        return self._temporary / name

    def publish(
        self, manifest: Manifest, files: Mapping[str, bytes], above: Mapping[str, bytes]
    ) -> None:
        for name, content in files.items():
            storage.write_file(self.path_of(name), content)
        # Written here and moved by finish, so that a full disk is noticed before anything has
        # changed.
        for name, content in above.items():
            storage.write_file(self.path_of(NEW + name), content)
        storage.write_file(self.path_of(MANIFEST_NAME), manifest.dumps())
        self._check_written(read_manifest(self.path_of(MANIFEST_NAME)))
        # The renames are durable after finish: an error raised here means that nothing was saved.
        storage.fsync_path(self._temporary)
        if self.final.exists():
            if _exchange(self._temporary, self._replaced, self.final):
                return
            os.rename(self.final, self._replaced)
        try:
            os.rename(self._temporary, self.final)
        except OSError:
            if self._replaced.exists():
                os.rename(self._replaced, self.final)
            raise

    def finish(self, above: Mapping[str, bytes]) -> None:
        storage.fsync_path(self.directory)  # `latest` names the checkpoint once it is durable
        for name in above:
            os.replace(self.final / (NEW + name), self.directory / name)
        storage.fsync_path(self.directory)
        discard_replaced(self.final)

    def abort(self) -> None:
        # Rename first: a rank that is still writing cannot add a file to a folder that is being
        # removed.
        written = self._temporary
        with suppress(OSError):
            written = written.rename(self.directory / (DROPPED + self.save_id))
        shutil.rmtree(written, ignore_errors=True)


class ObjectStoreTarget(CommitTarget):
    """Target in an object store: the objects are a checkpoint once their manifest exists (FORMAT.md
    section 10).
    """

    def prepare(self) -> None:
        objects = objects_in(self.final)
        if objects and not any(_is_own_object(item) for item in objects):
            raise CheckpointError(
                f"{self.final} holds {objects[0].name} and is no checkpoint of hf-zero; move it "
                "away or save under another tag, so that nothing is lost"
            )
        if objects and is_checkpoint(self.final):
            _log_replacing(self.final)
        remove_unlisted(self.final)

    def file_name(self, name: str) -> str:
        stem, dot, suffix = name.rpartition(".")
        return f"{stem}-{self.save_id[:12]}{dot}{suffix}"

    def path_of(self, name: str) -> AnyPath:
        return self.final / name

    def publish(
        self, manifest: Manifest, files: Mapping[str, bytes], above: Mapping[str, bytes]
    ) -> None:
        for name, content in files.items():
            object_store.put_object(self.path_of(name), content)
        content = manifest.dumps()
        # Parse it before the upload: an unreadable manifest is never published.
        self._check_written(parse_manifest(content, self.path_of(MANIFEST_NAME)))
        try:
            object_store.put_object(self.path_of(MANIFEST_NAME), content)
        except OSError as error:
            if not self._is_published():
                raise
            logger.warning(
                "%s is saved: the store has its manifest, although writing it failed (%s)",
                self.final,
                error,
            )

    def _is_published(self) -> bool | None:
        """Return whether the manifest in the store is that of this save; None if it cannot be read.
        A store may accept an object and lose its answer, as in a timeout.
        """
        path = self.path_of(MANIFEST_NAME)
        try:
            with store_errors(path):
                manifest = path.is_file()
            return manifest and read_manifest(path).save_id == self.save_id
        except (CheckpointError, OSError):
            return None

    def finish(self, above: Mapping[str, bytes]) -> None:
        for name, content in above.items():
            object_store.put_object(self.directory / name, content)
        remove_unlisted(self.final)

    def abort(self) -> None:
        # The store may have accepted the manifest before an interruption. Unless its manifest is
        # known to be another one, or none, the files stay; the next save of this tag removes those
        # that its manifest does not list.
        if self._is_published() is not False:
            return
        try:
            of_save = f"-{self.save_id[:12]}"
            remove_objects(item for item in objects_in(self.final) if item.stem.endswith(of_save))
        except Exception as error:
            logger.warning(
                "files of a save that failed are left in %s; the next save of this "
                "tag removes them (%s)",
                self.final,
                error,
            )


def _save_of(tag: str) -> re.Pattern[str]:
    """Return a pattern for the names of temporary folders of ``tag``, and the id's digits in it."""
    return re.compile(re.escape(SAVING + tag) + r"(?:\.([0-9a-f]{8}))?")


def canonical_path(final: AnyPath) -> str:
    """Return the path of a checkpoint, which is the same for all processes of a host."""
    return str(final) if is_remote(final) else str(final.parent.resolve() / final.name)


def save_id_in(folder: AnyPath) -> str:
    """Return the id of the save of a checkpoint; "" if there is none, or none that can be read."""
    try:
        with store_errors(folder):
            return read_manifest(folder / MANIFEST_NAME).save_id
    except (CheckpointError, OSError):
        return ""


@cache
def _log_replacing(final: AnyPath) -> None:
    """Log once in a process that ``final`` is replaced: some scripts do it in each save."""
    logger.info(
        "the checkpoint %r in %s is replaced; another tag or folder keeps it",
        final.name,
        final.parent,
    )


def _exchange(temporary: Path, replaced: Path, final: Path) -> bool:
    """Rename ``temporary`` to ``final`` and the latter to ``replaced``, with a checkpoint named
    ``final`` at every moment. Returns False, with no effect, where the system cannot.
    """
    os.rename(temporary, replaced)
    exchanged = False
    try:
        exchanged = storage.exchange(replaced, final)
    finally:
        if not exchanged:
            os.rename(replaced, temporary)
    return exchanged


def discard_replaced(final: Path) -> None:
    """Remove the checkpoint that :meth:`FolderTarget.publish` moved aside. Files in it that are not
    part of the format move to ``final``.
    """
    replaced = final.with_name(REPLACED + final.name)
    if replaced.is_symlink():
        logger.warning(
            "%s was a link; the checkpoint it led to stays in %s", final, os.path.realpath(replaced)
        )
    elif replaced.exists():
        for item in list(replaced.iterdir()):
            if not _is_own_file(item) and not (final / item.name).exists():
                os.rename(item, final / item.name)
    storage.remove_tree(replaced)


def _is_own_file(item: Path) -> bool:
    return (
        item.name in (MANIFEST_NAME, OBJECTS_NAME)
        or item.match(RANK_PATTERN)
        or item.name.startswith(RESERVED)
    )


def remove_unlisted(final: AnyPath) -> None:
    """Remove the rank files and ``objects`` files that the manifest in ``final`` does not list; all
    of them if there is no manifest.
    """
    manifest = final / MANIFEST_NAME
    listed = set[str]()
    try:
        if manifest.is_file():
            listed = {entry.name for entry in read_manifest(manifest).all_files()}
    except CheckpointError:
        return  # a damaged manifest no longer tells which files belong to the checkpoint
    remove_objects(
        item
        for item in objects_in(final)
        if _is_own_object(item) and item.name != MANIFEST_NAME and item.name not in listed
    )


def _is_own_object(item: AnyPath) -> bool:
    stem, _, suffix = OBJECTS_NAME.rpartition(".")
    return (
        item.name == MANIFEST_NAME
        or fnmatch(item.name, RANK_PATTERN)
        or (item.name.startswith(f"{stem}-") and item.suffix == f".{suffix}")
    )
