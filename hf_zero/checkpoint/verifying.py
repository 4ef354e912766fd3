"""Whether a checkpoint is whole: sizes, headers, hashes, and every element of every parameter exactly once."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from hf_zero.checkpoint import folders
from hf_zero.checkpoint.bar import Tick, bar
from hf_zero.checkpoint.manifest import MANIFEST_NAME
from hf_zero.checkpoint.opened import Checkpoint
from hf_zero.checkpoint.places import Place, place
from hf_zero.checkpoint.records import FileEntry
from hf_zero.errors import CheckpointError


@dataclass(frozen=True)
class Verdict:
    """What was found in one checkpoint. ``problems`` is empty if it is whole; each names its file and the remedy.

    ``nbytes`` were read and hashed; ``parameters`` and ``elements`` are what the manifest promises, each held once.
    """

    folder: Place
    files: int
    nbytes: int
    parameters: int
    elements: int
    problems: tuple[str, ...]

    @property
    def whole(self) -> bool:
        return not self.problems


def verify_checkpoint(src: str | os.PathLike[str], tag: str | None = None, progress: bool | None = None) -> Verdict:
    """Check one checkpoint: everything FORMAT.md section 7 names, the hash of every file included. Changes nothing.

    Args:
        src: the folder given to ``save_checkpoint``, one checkpoint in it, a Trainer's ``checkpoint-N`` or output folder.
        tag: by default the one that ``latest`` names.
        progress: a bar on stderr; by default only where stderr is a terminal.

    Raises:
        CheckpointError: there is no checkpoint at all. One that is damaged is a verdict, with all that is wrong with it.
    """
    folder = folders.find(src, tag)
    if not folders.is_checkpoint(folder):
        raise CheckpointError(
            f"{folder} was not written by hf-zero and carries no hashes; convert-checkpoint and load_checkpoint check what it holds"
        )
    try:
        checkpoint = Checkpoint(folder, sizes=False)
    except CheckpointError as error:
        return _nothing(folder, str(error))
    problems: list[str] = []
    listed = checkpoint.listed()
    with checkpoint, bar(progress, sum(_there(folder, entry) for entry in listed), f"verifying {folder}") as tick:
        read = sum(_check(checkpoint, index, entry, tick, problems) for index, entry in enumerate(listed))
        if not problems:
            _note(problems, checkpoint.client_state)
            _note(problems, checkpoint.scheduler_state)
    slots = [slot for flat in checkpoint.manifest.flats for slot in flat.layout.slots]
    return Verdict(folder, len(listed), read, len(slots), sum(slot.numel for slot in slots), tuple(problems))


def verify_all(src: str | os.PathLike[str], progress: bool | None = None) -> list[Verdict]:
    """:func:`verify_checkpoint` of every tag in ``src``, oldest first. Raises CheckpointError if there is none.

    Folders with ranks' files and no manifest, and a ``latest`` that names no checkpoint, are damage too and come last.
    """
    root = place(src)
    held = folders.tags(root)
    if not held:
        return [verify_checkpoint(root, progress=progress)]
    verdicts = [verify_checkpoint(root, tag, progress) for tag in held]
    for folder in sorted(root.iterdir(), key=lambda item: item.name):
        if not folder.name.startswith(".") and folder.name not in held and next(iter(folder.glob(folders.RANK_PATTERN)), None):
            verdicts.append(_nothing(folder, f"{folder / MANIFEST_NAME} is missing; restore it, or load another tag of this run"))
    if (root / folders.LATEST).exists() or (root / folders.LATEST).is_symlink():
        problems: list[str] = []
        _note(problems, lambda: folders.locate(root))
        verdicts += [_nothing(root / folders.LATEST, said) for said in problems]
    return verdicts


def _nothing(path: Place, problem: str) -> Verdict:
    return Verdict(path, 0, 0, 0, 0, (problem,))


def _check(checkpoint: Checkpoint, index: int, entry: FileEntry, tick: Tick, problems: list[str]) -> int:
    """All that can be wrong with one file goes to ``problems``; the bytes that were hashed are returned."""
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


def _there(folder: Place, entry: FileEntry) -> int:
    with suppress(OSError):
        return min((folder / entry.name).stat().st_size, entry.size)
    return 0
