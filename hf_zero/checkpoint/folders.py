"""Folders of a run: tags, which one is the latest, and how a new one appears whole or not at all
(FORMAT.md section 6).
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from hf_zero.checkpoint.foreign import recognise
from hf_zero.checkpoint.manifest import MANIFEST_NAME
from hf_zero.checkpoint.places import Place, modified, place, store_errors
from hf_zero.checkpoint.tensorfile import write_all
from hf_zero.errors import CheckpointError
from hf_zero.logs import logger

LATEST = "latest"
MODEL = "huggingface"  # the reader of foreign folders that hold weights and no training state
OBJECTS_NAME = "objects.pt"
RANK_PATTERN = "rank-*-of-*.safetensors"
RESERVED = ".hf-zero-"
SAVING = RESERVED + "saving-"
REPLACED = RESERVED + "replaced-"
NEW = RESERVED + "new-"
DROPPED = RESERVED + "dropped-"
LONGEST_TAG = 230  # bytes: with what is put around it meanwhile, a name that file systems take
LONGEST_LATEST = 4096  # bytes; beyond it is damage, not a tag


def check_tag(tag: object) -> str:
    """``tag`` as a string. Raises CheckpointError if it cannot name a folder of a checkpoint."""
    name = str(tag)
    if (
        not name
        or name.startswith(".")
        or name == LATEST
        or Path(name).name != name
        or "\0" in name
    ):
        raise CheckpointError(
            f"{name!r} cannot be a tag; pass one path component that does not start with a dot "
            f"and is not {LATEST!r}"
        )
    if name != name.strip():
        raise CheckpointError(
            f"{name!r} cannot be a tag; pass it without spaces or line ends around it, which "
            f"{LATEST!r} does not keep"
        )
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"{name!r} cannot be a tag; pass one that can be written as UTF-8"
        ) from error
    if size > LONGEST_TAG:
        raise CheckpointError(
            f"{name[:40]!r}… cannot be a tag; pass one of at most {LONGEST_TAG} "
            f"bytes, it has {size}"
        )
    return name


def is_checkpoint(folder: Place) -> bool:
    """Whether ``folder`` is a checkpoint of ours."""
    return (folder / MANIFEST_NAME).is_file()


def can_be_read(folder: Place) -> bool:
    """Whether ``folder`` is a checkpoint of ours, or one that another program wrote and we read."""
    return is_checkpoint(folder) or bool(recognise(folder))


def tags(directory: Place) -> list[str]:
    """The tags in ``directory`` that hold a checkpoint, oldest first."""
    if not directory.is_dir():
        return []
    found = [
        item for item in directory.iterdir() if not item.name.startswith(".") and can_be_read(item)
    ]
    return [item.name for item in sorted(found, key=written)]


def written(folder: Place) -> tuple[int, str]:
    """What orders checkpoints by age: when the manifest came, if there is one, and the name."""
    # The folder's own time changes with every file that anyone puts beside ours, and a store has no
    # folders.
    try:
        return modified(folder / MANIFEST_NAME), folder.name
    except FileNotFoundError:  # another program's
        return modified(folder), folder.name


def locate(directory: str | os.PathLike[str], tag: str | None = None) -> Place:
    """The folder of checkpoint ``tag`` in ``directory``, by default the one that ``latest`` names,
    or a foreign one itself.

    Raises CheckpointError saying what was looked for and which tags exist.
    """
    root = place(directory)
    if tag is not None:
        name = check_tag(tag)
    elif recognise(root) and not any(is_checkpoint(root / held) for held in tags(root)):
        # where a checkpoint of ours lies beside whole weights, a save was stopped before it wrote
        # `latest`
        return root
    else:
        name = latest_tag(root)
    # A save that replaced this tag may have been stopped between its two renames.
    for folder in (root / name, root / (REPLACED + name)):
        if can_be_read(folder):
            return folder
    raise CheckpointError(
        f"no checkpoint {name!r} in {root}: {root / name / MANIFEST_NAME} does not "
        f"exist; {_remedy(root)}"
    )


def latest_tag(root: Place) -> str:
    """The tag that ``latest`` in ``root`` names. Raises CheckpointError where there is none."""
    path = root / LATEST
    try:
        with store_errors(path), path.open("rb") as file:
            content = file.read(LONGEST_LATEST)
        name = content.decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"no checkpoint in {root}: {path} is missing or unreadable; {_remedy(root)}"
        ) from error
    try:
        return check_tag(name)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} is damaged: {name[:40]!r} cannot be a tag; {_remedy(root)}"
        ) from error


def _remedy(root: Place) -> str:
    found = [tag for tag in tags(root) if recognise(root / tag) != MODEL]
    if found:
        return f"pass one of the tags that exist: {', '.join(found)}"
    below = (
        sorted(folder.name for folder in root.iterdir() if folder.is_dir() and tags(folder))
        if root.is_dir()
        else []
    )
    if below:
        return (
            f"its folders {', '.join(below[:4])}{' …' if len(below) > 4 else ''} hold "
            "checkpoints; pass one of them"
        )
    return (
        "there is no checkpoint of hf-zero in it; pass the folder that was given to "
        "save_checkpoint or save_state"
    )


def temporary_folder(directory: Path, tag: str, save_id: str) -> Path:
    """Where a save of ``tag`` is put together: a folder of its own, so that two jobs never write
    into one.
    """
    return directory / f"{SAVING}{tag}.{save_id[:8]}"


def begin(directory: Path, tag: str, save_id: str) -> Path:
    """Make the temporary folder of a save of ``tag``, after mending what an interrupted save of
    it left.
    """
    make_folder(directory)
    for dropped in directory.glob(f"{DROPPED}*"):
        shutil.rmtree(dropped, ignore_errors=True)
    replaced, final = directory / (REPLACED + tag), directory / tag
    if (
        os.path.lexists(final)
        and not is_checkpoint(final)
        and (not final.is_dir() or any(final.iterdir()))
    ):
        raise CheckpointError(
            f"{final} exists and is no checkpoint of hf-zero; move it away or save under another "
            "tag, so that nothing is lost"
        )
    if replaced.exists():
        if is_checkpoint(final):
            discard_replaced(final)
        else:
            os.rename(replaced, final)
    of_this_tag = re.compile(re.escape(SAVING + tag) + r"(\.[0-9a-f]{8})?")
    for other in directory.glob(f"{SAVING}*"):
        if of_this_tag.fullmatch(other.name):
            remove_tree(other)
        else:
            logger.warning(
                "%s was left by an interrupted save, or another job saves into the same folder; "
                "remove it if no job does",
                other,
            )
    temporary = temporary_folder(directory, tag, save_id)
    temporary.mkdir()
    return temporary


def publish(temporary: Path, tag: str) -> Path:
    """Rename the finished ``temporary`` folder to ``tag``; a checkpoint that stood there stays
    until this is done.
    """
    directory = temporary.parent
    final, replaced = directory / tag, directory / (REPLACED + tag)
    fsync_folder(temporary)
    if final.exists():
        os.rename(final, replaced)
    try:
        os.rename(temporary, final)
    except OSError:
        if replaced.exists():
            os.rename(replaced, final)
        raise
    fsync_folder(directory)
    return final


def discard_replaced(final: Path) -> None:
    """Remove the checkpoint that :func:`publish` moved aside; files in it that are not the
    format's own move over.
    """
    replaced = final.with_name(REPLACED + final.name)
    if replaced.is_symlink():
        logger.warning(
            "%s was a link; the checkpoint it led to stays in %s", final, os.path.realpath(replaced)
        )
    elif replaced.exists():
        for item in list(replaced.iterdir()):
            if not _is_own(item) and not (final / item.name).exists():
                os.rename(item, final / item.name)
    remove_tree(replaced)


def _is_own(item: Path) -> bool:
    return (
        item.name in (MANIFEST_NAME, OBJECTS_NAME)
        or item.match(RANK_PATTERN)
        or item.name.startswith(RESERVED)
    )


def rename(source: Path, target: Path) -> None:
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


def rank_file(rank: int, world_size: int) -> str:
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


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
