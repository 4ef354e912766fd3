"""Lookup of checkpoints: tags and `latest` of a run, whether a checkpoint can be loaded, and the
newest complete one below a folder that is not itself a run (FORMAT.md section 6).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from hf_zero.checkpoint.manifest import MANIFEST_NAME
from hf_zero.checkpoint.reader import ShardedCheckpoint, recognize
from hf_zero.checkpoint.storage import AnyPath, as_path, is_remote, store_errors
from hf_zero.errors import CheckpointError
from hf_zero.logging import listed, logger, parse_json

LATEST = "latest"
SCRIPT = "zero_to_fp32.py"
HUGGINGFACE = "huggingface"  # name of the reader for folders with weights and no training state
OBJECTS_NAME = "objects.pt"
RANK_PATTERN = "rank-*-of-*.safetensors"
RESERVED = ".hf-zero-"
SAVING = RESERVED + "saving-"
REPLACED = RESERVED + "replaced-"
NEW = RESERVED + "new-"
DROPPED = RESERVED + "dropped-"
LONGEST_TAG = 230  # bytes; with its temporary prefix and suffix, a name that file systems accept
NOT_FOLLOWED = "leads out of it and is not followed; pass the folder that the link leads to"
LONGEST_LATEST = 4096  # bytes; beyond it is damage, not a tag
_NUMBER = re.compile(r"(\d+)")


def check_tag(tag: object) -> str:
    """Return ``tag`` as a string. Raises CheckpointError if it cannot name a checkpoint folder."""
    name = str(tag)
    if (
        not name
        or name.startswith(".")
        or name in (LATEST, SCRIPT)
        or Path(name).name != name
        or "\0" in name
    ):
        raise CheckpointError(
            f"{name!r} cannot be a tag; pass one path component that does not start with a dot "
            f"and is neither {LATEST!r} nor {SCRIPT!r}"
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


def is_checkpoint(folder: AnyPath) -> bool:
    """Return whether ``folder`` is a checkpoint that hf-zero wrote."""
    return bool((folder / MANIFEST_NAME).is_file())


def can_be_read(folder: AnyPath) -> bool:
    """Return whether ``folder`` is a checkpoint of hf-zero, or of a supported other program."""
    return is_checkpoint(folder) or bool(recognize(folder))


def tags_in(directory: AnyPath) -> list[str]:
    """Return the tags in ``directory`` that hold a checkpoint, oldest first."""
    if not directory.is_dir():
        return []
    checkpoints = [
        item for item in directory.iterdir() if not item.name.startswith(".") and can_be_read(item)
    ]
    return [item.name for item in oldest_first(checkpoints)]


def _recognized_itself(root: AnyPath) -> str:
    """Return :func:`recognize` of ``root``, or "" for a folder with checkpoints of hf-zero in it: a
    save there was stopped before it wrote ``latest``.
    """
    program = recognize(root)
    if program and any(is_checkpoint(root / tag) for tag in tags_in(root)):
        return ""
    return program


def is_one_checkpoint(root: AnyPath) -> bool:
    """Return whether ``root`` itself is a checkpoint with training state, of any program, and not
    the folder of a run, which may hold a model beside its checkpoints.
    """
    return is_checkpoint(root) or _recognized_itself(root) not in ("", HUGGINGFACE)


def oldest_first(folders: Iterable[AnyPath]) -> list[AnyPath]:
    """Return checkpoints in the order of their saves: within one folder by the ``order`` of their
    manifests, over several by step, equal ones by the numbers in their paths. Checkpoints of other
    programs are first. No clock is asked: copies and restored backups have new times.
    """
    ages = [(folder, *_age(folder)) for folder in folders]
    if len({folder.parent for folder, *_ in ages}) > 1:
        ages = [(folder, step, order) for folder, order, step in ages]
    return [
        folder for folder, *_ in sorted(ages, key=lambda one: (*one[1:], _natural(str(one[0]))))
    ]


def next_order(directory: AnyPath) -> int:
    """Return the ``order`` of the manifest of a new save in ``directory``."""
    checkpoints = [item for item in directory.iterdir() if is_checkpoint(item)]
    return 1 + max((_age(item)[0] for item in checkpoints), default=0)


def _age(folder: AnyPath) -> tuple[int, int]:
    """Return order and step of a checkpoint; 0 for an order that it lacks, and -1 for a step."""
    if not is_checkpoint(folder):
        return 0, -1
    manifest = folder / MANIFEST_NAME
    try:
        with store_errors(folder):
            if is_remote(manifest):  # not every store tells when a file was written
                return _read_age(manifest)
            written = manifest.stat()
            return _age_of(manifest, (written.st_mtime_ns, written.st_size))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return 0, -1  # damaged


@lru_cache(maxsize=4096)
def _age_of(manifest: AnyPath, written: tuple[int, int]) -> tuple[int, int]:
    """Return order and step in ``manifest``, whose time and size were ``written``. Each save asks
    this of every checkpoint in its folder, and a manifest may have megabytes of hashes.
    """
    return _read_age(manifest)


def _read_age(manifest: AnyPath) -> tuple[int, int]:
    with manifest.open("rb") as file:
        read = parse_json(file.read())
    order, step = read.get("order", 0), read["counters"].get("global_steps", -1)
    return (order, step) if type(order) is type(step) is int else (0, -1)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that compares the numbers in ``name`` by value."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBER.split(name)]


def locate(directory: str | os.PathLike[str], tag: str | None = None) -> AnyPath:
    """Return the folder of checkpoint ``tag`` in ``directory``. By default that is the tag in
    ``latest``, or ``directory`` itself if it is a checkpoint.

    Raises CheckpointError with what was looked for and the tags that exist.
    """
    root = as_path(directory)
    if tag is not None:
        name = check_tag(tag)
    elif is_checkpoint(root) or _recognized_itself(root):
        return root
    else:
        name = latest_tag(root)
    # A save that replaced this tag may have been stopped between its two renames; the old
    # checkpoint then still has its temporary name.
    for folder in (root / name, root / (REPLACED + name)):
        if can_be_read(folder):
            return folder
    raise CheckpointError(
        f"no checkpoint {name!r} in {root}: {root / name / MANIFEST_NAME} does not "
        f"exist; {_remedy(root)}"
    )


def latest_tag(root: AnyPath) -> str:
    """Return the tag that ``latest`` in ``root`` names. Raises CheckpointError if there is none."""
    path = root / LATEST
    try:
        if not path.is_file():  # a pipe would never answer
            raise FileNotFoundError(path)
        with store_errors(path), path.open("rb") as file:
            content = file.read(LONGEST_LATEST)
        name = content.decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        if not is_remote(root) and not root.exists():
            raise CheckpointError(
                f"no checkpoint in {root}: there is no such folder (looked for {root.resolve()}); "
                "pass the folder that was given to save_checkpoint or save_state"
            ) from None
        raise CheckpointError(
            f"no checkpoint in {root}: {path} is missing or unreadable; {_remedy(root)}"
        ) from error
    try:
        return check_tag(name)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} is damaged: {name[:40]!r} cannot be a tag; {_remedy(root)}"
        ) from error


def _cut_off(root: AnyPath) -> str:
    """Return what is missing in a folder of torch.distributed.checkpoint, or ""."""
    if is_remote(root) or next(root.glob("*.distcp"), None) is None or recognize(root):
        return ""
    return (
        "it has .distcp files of torch.distributed.checkpoint, but not .metadata, which a save "
        "writes last; restore that file, or pass another checkpoint"
    )


def _remedy(root: AnyPath) -> str:
    if cut_off := _cut_off(root):
        return cut_off
    tags = [tag for tag in tags_in(root) if recognize(root / tag) != HUGGINGFACE]
    if tags:
        return f"pass one of the tags that exist: {', '.join(tags)}"
    inner = root.iterdir() if root.is_dir() else ()
    below = sorted(folder.name for folder in inner if folder.is_dir() and tags_in(folder))
    if below:
        return (
            f"its folders {', '.join(below[:4])}{' …' if len(below) > 4 else ''} hold "
            "checkpoints; pass one of them"
        )
    links: list[AnyPath] = []
    if root.is_dir() and [*walk(root, links)] and links:
        return f"{_listed(root, links)} {NOT_FOLLOWED}"
    return (
        "there is no checkpoint of hf-zero in it; pass the folder that was given to "
        "save_checkpoint or save_state"
    )


def rank_file(rank: int, world_size: int) -> str:
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def integrity_error(folder: AnyPath) -> str:
    """Return the reason why the checkpoint in ``folder`` cannot be loaded, or "". Checks manifest,
    sizes and headers and reads no tensor; ``verify`` does.

    For a checkpoint of another program only its presence is checked.
    """
    if not is_checkpoint(folder):
        if can_be_read(folder):
            return ""
        return f"{folder} holds no checkpoint; restore it, or load another one"
    try:
        with ShardedCheckpoint(folder) as checkpoint:
            for index in range(len(checkpoint.manifest.files)):
                checkpoint.file(index)
    except (CheckpointError, OSError) as error:
        return str(error)
    return ""


def complete_tags_beside(folder: AnyPath) -> list[str]:
    """Return the tags of the other complete checkpoints in the run of ``folder``, oldest first."""
    return [
        tag
        for tag in tags_in(folder.parent)
        if tag != folder.name and not integrity_error(folder.parent / tag)
    ]


def newest_complete(root: AnyPath) -> tuple[AnyPath, str] | None:
    """Return folder and tag of the checkpoint with training state that a run in ``root`` resumes
    from: the one that ``latest`` names, else the newest; damaged ones are skipped, with a warning.
    None if there is none. ``root`` may be a checkpoint itself, also one of another program.

    Raises CheckpointError if there are several and each is damaged, and for one without .metadata.
    """
    if is_one_checkpoint(root):
        named = root if root.name not in ("", "..") else root.resolve()
        return named.parent, named.name
    tags = [tag for tag in tags_in(root) if recognize(root / tag) != HUGGINGFACE][::-1]
    if (root / LATEST).is_file():
        try:
            folder = locate(root)
            tags.insert(0, folder.name.removeprefix(REPLACED))
        except CheckpointError as error:
            logger.warning("%s", error)
    folders = {locate(root, tag): tag for tag in dict.fromkeys(tags)}
    if not folders:
        if cut_off := _cut_off(root):
            raise CheckpointError(f"no checkpoint in {root}: {cut_off}")
        return None
    return root, folders[_newest(root, list(folders), complete=True)]


LISTED = 6  # most candidates that a message names


def find_checkpoint(
    source: str | os.PathLike[str], tag: str | None = None, complete: bool = True
) -> AnyPath:
    """Return the checkpoint meant by ``source``: the folder itself, the one that its ``latest``
    names, or the newest hf-zero checkpoint at any depth below.

    Among several below, damaged ones are skipped if ``complete``, and the choice is logged. A
    folder of another program is returned if it is ``source`` itself, or the only one in it with
    training state. Raises CheckpointError with what was found.
    """
    root = as_path(source)
    if tag is None and is_checkpoint(root):
        return root
    if not root.is_dir():
        why = "it is not a folder" if root.exists() else "there is no such folder"
        raise CheckpointError(
            f"no checkpoint at {root}: {why}; pass the folder that was given to "
            "save_checkpoint, or a tag in it"
        )
    if (
        tag is not None
        and not can_be_read(named := root / check_tag(tag))
        and (named / LATEST).is_file()
    ):
        return locate(named)  # a state folder of Accelerate, with our checkpoint inside
    if tag is not None or (root / LATEST).is_file():
        return locate(root, tag)
    if newest_first := checkpoints_below(root)[::-1]:
        return _newest(root, newest_first, complete)
    if recognize(root):
        return root
    foreign = [folder for folder in _children(root) if recognize(folder)]
    states = [folder for folder in foreign if recognize(folder) != HUGGINGFACE]
    if len(states) == 1:
        return states[0]
    if foreign:
        raise CheckpointError(
            f"no checkpoint of hf-zero in {root}; if one of these is meant, pass it: "
            f"{_listed(root, foreign)}"
        )
    return locate(root)  # raises the error that names what was looked for


def checkpoints_below(root: AnyPath) -> list[AnyPath]:
    """Return the hf-zero checkpoints in ``root``, at any depth, oldest first."""
    return oldest_first(folder for folder in walk(root) if is_checkpoint(folder))


def walk(root: AnyPath, unfollowed: list[AnyPath] | None = None) -> Iterator[AnyPath]:
    """Yield ``root`` and the folders below it, without hidden ones and without the content of
    checkpoints. In an object store, yield the folders that hold a manifest.

    A link is not followed, so that a search stays in ``root``: one that leads to a checkpoint
    elsewhere is yielded at the end, as its copy, and one to another folder elsewhere is added to
    ``unfollowed``.
    """
    if is_remote(root):  # a store has no folders, but names with slashes
        for manifest in sorted(root.glob(f"**/{MANIFEST_NAME}"), key=str):
            inner = manifest.parent.path.removeprefix(root.path).strip("/")
            if not any(part.startswith(".") for part in inner.split("/")):
                yield manifest.parent
        return
    links: list[AnyPath] = []
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        yield folder
        if not is_checkpoint(folder):
            children = _children(folder)
            links += [child for child in children if child.is_symlink()]
            waiting += reversed([child for child in children if not child.is_symlink()])
    visited, inside = set[str](), Path(os.path.realpath(root))
    for link in links:
        real = os.path.realpath(link)
        if real in visited or Path(real).is_relative_to(inside):
            continue
        visited.add(real)
        if not inside.is_relative_to(real) and can_be_read(link):
            yield link
        elif unfollowed is not None:
            unfollowed.append(link)


def _children(folder: AnyPath) -> list[AnyPath]:
    try:
        children = [
            item for item in folder.iterdir() if not item.name.startswith(".") and item.is_dir()
        ]
    except PermissionError:
        return []
    return sorted(children, key=lambda item: item.name)


def _newest(root: AnyPath, newest_first: list[AnyPath], complete: bool) -> AnyPath:
    if len(newest_first) == 1:
        return newest_first[0]
    many = len(newest_first)
    for folder in newest_first:
        damage = integrity_error(folder) if complete else ""
        if not damage:
            logger.info(
                "taking %s, the newest %scheckpoint of %d in %s",
                folder,
                "complete " if complete else "",
                many,
                root,
            )
            return folder
        logger.warning("%s is skipped: %s", folder, damage)
    raise CheckpointError(
        f"each of the {many} checkpoints in {root} is damaged: "
        f"{_listed(root, newest_first)}; restore one of them"
    )


def _listed(root: AnyPath, folders: list[AnyPath]) -> str:
    return listed((str(folder.relative_to(root)) for folder in folders), LISTED)
