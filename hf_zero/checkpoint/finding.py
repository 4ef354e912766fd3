"""Which checkpoint a folder means that is none itself: the newest one of ours below it, never a
model folder that lies there as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from hf_zero.checkpoint import folders
from hf_zero.checkpoint.foreign import recognise
from hf_zero.checkpoint.manifest import MANIFEST_NAME
from hf_zero.checkpoint.places import Place, is_remote, place
from hf_zero.checkpoint.wholeness import trouble
from hf_zero.errors import CheckpointError
from hf_zero.logs import logger

LISTED = 6  # candidates that a message names


def find(source: str | os.PathLike[str], tag: str | None = None, whole: bool = True) -> Place:
    """The checkpoint that ``source`` means: itself, the one that its ``latest`` names, or the
    newest of ours at any depth below.

    Of several below, damaged ones are passed over unless ``whole`` is false, and the one that is
    taken is logged. A folder that another program wrote is taken where it is ``source`` itself, or
    the only one in it that holds training state. Raises CheckpointError with what is there.
    """
    root = place(source)
    if tag is None and folders.is_checkpoint(root):
        return root
    if not root.is_dir():
        raise CheckpointError(
            f"no checkpoint at {root}: it is no folder; pass the folder that was given to "
            "save_checkpoint, or a tag in it"
        )
    if (
        tag is not None
        and not folders.can_be_read(named := root / folders.check_tag(tag))
        and (named / folders.LATEST).is_file()
    ):
        return folders.locate(named)  # Accelerate's folder of one state, which holds ours
    if tag is not None or (root / folders.LATEST).is_file():
        return folders.locate(root, tag)
    if newest_first := checkpoints_below(root)[::-1]:
        return _newest(root, newest_first, whole)
    if recognise(root):
        return root
    foreign = [folder for folder in _children(root) if recognise(folder)]
    states = [folder for folder in foreign if recognise(folder) != folders.MODEL]
    if len(states) == 1:
        return states[0]
    if foreign:
        raise CheckpointError(
            f"no checkpoint of hf-zero in {root}; if one of these is meant, pass it: "
            f"{_listed(root, foreign)}"
        )
    return folders.locate(root)  # raises, with what it looked for


def checkpoints_below(root: Place) -> list[Place]:
    """The checkpoints of ours in ``root``, at any depth, oldest first."""
    return sorted(
        (folder for folder in walk(root) if folders.is_checkpoint(folder)), key=folders.written
    )


def walk(root: Place) -> Iterator[Place]:
    """``root`` and the folders below it, without hidden ones and without what lies inside a
    checkpoint.
    """
    if is_remote(root):  # a store has no folders, but names with slashes
        for manifest in sorted(root.glob(f"**/{MANIFEST_NAME}"), key=str):
            inner = manifest.parent.path.removeprefix(root.path).strip("/")
            if not any(part.startswith(".") for part in inner.split("/")):
                yield manifest.parent
        return
    seen: set[str] = set()  # a link may lead back up
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        real = os.path.realpath(folder)
        if real not in seen:
            seen.add(real)
            yield folder
            if not folders.is_checkpoint(folder):
                waiting += reversed(_children(folder))


def _children(folder: Place) -> list[Place]:
    try:
        found = [
            item for item in folder.iterdir() if not item.name.startswith(".") and item.is_dir()
        ]
    except PermissionError:
        return []
    return sorted(found, key=lambda item: item.name)


def _newest(root: Place, newest_first: list[Place], whole: bool) -> Place:
    if len(newest_first) == 1:
        return newest_first[0]
    many = len(newest_first)
    for folder in newest_first:
        damage = trouble(folder) if whole else ""
        if not damage:
            logger.info(
                "taking %s, the newest %sof %d checkpoints in %s",
                folder,
                "whole one " if whole else "",
                many,
                root,
            )
            return folder
        logger.warning("%s is passed over: %s", folder, damage)
    raise CheckpointError(
        f"each of the {many} checkpoints in {root} is damaged: "
        f"{_listed(root, newest_first)}; restore one of them"
    )


def _listed(root: Place, found: list[Place]) -> str:
    names = [str(folder.relative_to(root)) for folder in found[:LISTED]]
    return ", ".join(names) + (f" and {len(found) - LISTED} more" if len(found) > LISTED else "")
