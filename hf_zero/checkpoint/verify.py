"""Verification of a checkpoint: sizes, headers, hashes, and each element of parameters once."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from hf_zero.checkpoint import find
from hf_zero.checkpoint.find import find_checkpoint, walk
from hf_zero.checkpoint.foreign import huggingface
from hf_zero.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest
from hf_zero.checkpoint.memory.inventory import (
    holds_records,
    is_from_memory,
    is_slot,
    records_in,
    time_of_newest_record,
)
from hf_zero.checkpoint.memory.record import RankRecord, join_records
from hf_zero.checkpoint.progress import Tick, progress_bar
from hf_zero.checkpoint.reader import ShardedCheckpoint, recognize
from hf_zero.checkpoint.storage import AnyPath, as_path, is_remote
from hf_zero.checkpoint.tensorfile import TensorEntry, TensorFile, algorithm_of, hash_of_file
from hf_zero.errors import CheckpointError
from hf_zero.logging import listed


@dataclass(frozen=True)
class Verdict:
    """Result of verifying one checkpoint. ``problems`` is empty if it is complete; each one names
    its file and the remedy.

    ``nbytes`` were read and hashed; ``parameters`` and ``elements`` count what the manifest
    promises, each once. ``kind`` is "checkpoint", or "model" for a folder of ``save_pretrained`` or
    of a conversion, which has no hashes.
    """

    folder: AnyPath
    files: int
    nbytes: int
    parameters: int
    elements: int
    problems: tuple[str, ...]
    kind: str = "checkpoint"

    @property
    def whole(self) -> bool:
        return not self.problems


def verify_checkpoint(
    src: str | os.PathLike[str], tag: str | None = None, progress: bool | None = None
) -> Verdict:
    """Check one checkpoint: everything that FORMAT.md section 7 names, including the hash of every
    file. Changes nothing.

    Args:
        src: a checkpoint, or a folder with checkpoints in it at any depth, of which the newest is
            checked; or what this host holds of generations in memory (FORMAT.md section 11). A
            model folder has no hashes: its headers, sizes and index are checked.
        tag: by default the one that ``latest`` names.
        progress: whether to show a bar on stderr; by default only if stderr is a terminal.

    Raises:
        CheckpointError: there is no checkpoint at all. A damaged one gives a verdict with all of
            its problems.
    """
    slots = _slots_below(as_path(src)) if tag is None else []
    if slots:
        return _check_generation(max(slots, key=time_of_newest_record), progress)
    return _check_folder(find_checkpoint(src, tag, complete=False), progress)


def verify_all(src: str | os.PathLike[str], progress: bool | None = None) -> list[Verdict]:
    """Return a verdict on each checkpoint and each model folder in ``src``, at any depth, oldest
    first. Raises CheckpointError if there is none.

    Folders with rank files but no manifest, links that :func:`walk` does not follow, and a
    ``latest`` that names no checkpoint also count as damage and are listed last. Files in memory
    that a save overwrites do not.
    """
    root = as_path(src)
    # In an object store, checkpoints are found by their manifests; folders that have lost theirs
    # are found among the direct children of `root`.
    links: list[AnyPath] = []
    folders = [*walk(root, links)] if root.is_dir() else []
    if not is_from_memory(root):
        folders = [folder for folder in folders if not is_from_memory(folder)]
    slots = {folder for folder in folders if holds_records(folder)}
    checkpoints = [
        folder
        for folder in folders
        if folder in slots or find.is_checkpoint(folder) or recognize(folder) == find.HUGGINGFACE
    ]
    if not checkpoints:
        return [verify_checkpoint(root, progress=progress)]
    verdicts = [
        _check_generation(folder, progress) if folder in slots else _check_folder(folder, progress)
        for folder in find.oldest_first(checkpoints)
    ]
    around = sorted(
        {*folders, root, *([] if not is_remote(root) else root.iterdir())} - {*checkpoints}, key=str
    )
    for folder in around:
        if (
            not folder.name.startswith(".")
            and not find.is_checkpoint(folder)
            and not is_slot(folder)
            and next(iter(folder.glob(find.RANK_PATTERN)), None)
        ):
            verdicts.append(
                _nothing(
                    folder,
                    f"{folder / MANIFEST_NAME} is missing; restore it, or load "
                    "another tag of this run",
                )
            )
    verdicts += [_nothing(link, f"{link} {find.NOT_FOLLOWED}, or remove it") for link in links]
    for folder in around:
        if (folder / find.LATEST).exists() or (folder / find.LATEST).is_symlink():
            problems: list[str] = []
            _note(problems, partial(find.locate, folder))
            verdicts += [_nothing(folder / find.LATEST, problem) for problem in problems]
    return verdicts


def _check_folder(folder: AnyPath, progress: bool | None) -> Verdict:
    if find.is_checkpoint(folder):
        return _check_checkpoint(folder, progress)
    if recognize(folder) == find.HUGGINGFACE:
        return _check_model(folder)
    raise CheckpointError(
        f"{folder} was not written by hf-zero and carries no hashes; convert-checkpoint and "
        "load_checkpoint check what it holds"
    )


def _check_model(folder: AnyPath) -> Verdict:
    """Check the safetensors of a model folder, without hashes, against headers and the index."""
    problems: list[str] = []
    entries: list[TensorEntry] = []
    try:
        promised = huggingface.files_of(folder)
    except CheckpointError as error:
        return replace(_nothing(folder, str(error)), kind="model")
    for name, tensors in promised.items():
        try:
            with TensorFile(folder / name) as file:
                entries += file.entries.values()
                lost = sorted(tensors - set(file.entries))
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if lost:
            problems.append(
                f"{folder / name} lacks {listed(lost)}, which {huggingface.INDEX} places in it; "
                "convert or save the model again"
            )
    return Verdict(
        folder,
        len(promised),
        0,
        len(entries),
        sum(entry.numel for entry in entries),
        tuple(problems),
        "model",
    )


def _check_checkpoint(folder: AnyPath, progress: bool | None) -> Verdict:
    try:
        checkpoint = ShardedCheckpoint(folder, sizes=False)
    except CheckpointError as error:
        return _nothing(folder, str(error))
    problems: list[str] = []
    files = checkpoint.hashed_files()
    with (
        checkpoint,
        progress_bar(
            progress, sum(_there(folder, entry) for entry in files), f"verifying {folder}"
        ) as tick,
    ):
        read = sum(
            _check(checkpoint, index, entry, tick, problems) for index, entry in enumerate(files)
        )
        if not problems:
            _note(problems, checkpoint.client_state)
            _note(problems, checkpoint.scheduler_state)
    slots = [slot for parts in checkpoint.manifest.parts.values() for _, slot in parts]
    return Verdict(
        folder,
        len(files),
        read,
        len(checkpoint.manifest.parts),
        sum(slot.numel for slot in slots),
        tuple(problems),
    )


def _slots_below(root: AnyPath) -> list[AnyPath]:
    """Return the folders in ``root``, at any depth, with files of generations in memory."""
    if is_remote(root) or not root.is_dir():
        return []
    return [folder for folder in walk(root) if holds_records(folder)]


def _check_generation(folder: AnyPath, progress: bool | None) -> Verdict:
    """Check what a host holds of a generation in memory: each record, and the file beside it. Files
    of other hosts are no damage; parameters count where all files are here. ``folder`` has held
    records: a running job may have begun to overwrite them.
    """
    problems: list[str] = []
    records: list[RankRecord] = []
    for path in records_in(folder):
        _note(problems, partial(_read_record, path, records))
    if not records and not problems:
        problems.append(
            f"{folder} holds no record any more: a running job saves into it; verify it again"
        )
    read = 0
    with progress_bar(progress, sum(r.report.file.size for r in records), f"{folder}") as tick:
        for record in records:
            entry, before = record.report.file, len(problems)
            _note(problems, partial(_compare, folder, entry, tick))
            read += entry.size if len(problems) == before else 0
    slots = []
    if not problems and len(records) == records[0].world:
        manifests: list[Manifest] = []
        ordered = sorted(records, key=lambda record: record.rank)
        _note(problems, lambda: manifests.append(join_records(ordered)))
        slots = [
            slot for manifest in manifests for parts in manifest.parts.values() for _, slot in parts
        ]
    return Verdict(
        folder,
        len(records),
        read,
        len({slot.name for slot in slots}),
        sum(slot.numel for slot in slots),
        tuple(problems),
    )


def _read_record(path: AnyPath, into: list[RankRecord]) -> None:
    try:
        into.append(RankRecord.parse(path.read_bytes(), path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error


def _compare(folder: AnyPath, entry: FileEntry, tick: Tick) -> None:
    """Raise CheckpointError unless a file in memory is as its record says."""
    path = folder / entry.name
    try:
        digest = hash_of_file(path, algorithm_of(entry.hash), tick)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    if digest != entry.hash:
        raise CheckpointError(
            f"{path} is damaged: its hash is {digest}, its record says {entry.hash}; a resume "
            "takes another copy, an older generation or the disk"
        )


def _nothing(path: AnyPath, problem: str) -> Verdict:
    return Verdict(path, 0, 0, 0, 0, (problem,))


def _check(
    checkpoint: ShardedCheckpoint, index: int, entry: FileEntry, tick: Tick, problems: list[str]
) -> int:
    """Append every problem of one file to ``problems``. Returns the number of bytes hashed."""
    before = len(problems)
    _note(problems, lambda: checkpoint.check_size(entry))
    if len(problems) > before:
        return 0
    if index < len(checkpoint.manifest.files):
        _note(problems, lambda: checkpoint.file(index))
    _note(problems, lambda: checkpoint.verify([entry], tick))
    return entry.size


def _note(problems: list[str], check: Callable[[], object]) -> None:
    try:
        check()
    except CheckpointError as error:
        problems.append(str(error))


def _there(folder: AnyPath, entry: FileEntry) -> int:
    with suppress(OSError):
        return min(int((folder / entry.name).stat().st_size), entry.size)
    return 0
