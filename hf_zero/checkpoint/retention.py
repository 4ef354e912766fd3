"""Retention of checkpoints in a folder: which of them are beyond the number to keep, and their
removal, in which no partial checkpoint ever has the name of a complete one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from hf_zero.checkpoint import failures, find, object_store, storage
from hf_zero.checkpoint.commit import canonical_path, discard_replaced, save_id_in
from hf_zero.checkpoint.manifest import MANIFEST_NAME
from hf_zero.checkpoint.storage import AnyPath
from hf_zero.errors import CheckpointError
from hf_zero.logging import logger


def retain(final: AnyPath, keep: int, others: Mapping[tuple[str, str], object]) -> list[AnyPath]:
    """Keep the new checkpoint ``final`` and the newest complete ones beside it, ``keep`` in all.
    Return the folders that were removed.

    Only tags that differ from this one in their numbers alone are considered (``global_step100``
    and ``global_step200``, but not ``best``), and no saves of ``others``, which a warning names;
    the tag that ``latest`` names always stays. A failed removal is a warning, since the save itself
    has succeeded.
    """
    family = [
        folder
        for folder in final.parent.iterdir()
        if _stem(folder) == _stem(final) and find.is_checkpoint(folder)
    ]
    for folder in list(family) if others else ():
        writer = others.get((save_id_in(folder), canonical_path(folder)))
        if writer is not None:
            family.remove(folder)
            logger.warning(
                "%s was written by %s, which still runs: it is neither counted nor removed",
                folder,
                writer,
            )
    newest_first = find.oldest_first(family)[::-1]
    protected = {final}
    if (final.parent / find.LATEST).exists():
        try:
            protected.add(final.parent / find.latest_tag(final.parent))
        except CheckpointError as error:
            logger.warning("retention skipped: cannot read `latest` (%s)", error)
            return []
    return remove(excess(newest_first, keep, protected, find.integrity_error))


def excess(
    newest_first: Iterable[AnyPath],
    keep: int,
    protected: set[AnyPath],
    damage_of: Callable[[AnyPath], str],
) -> list[AnyPath]:
    """Return the complete checkpoints of ``newest_first`` beyond the first ``keep`` complete ones,
    oldest first, without the ``protected`` ones.

    ``damage_of`` returns what is wrong with a checkpoint, or "". If the newest one is damaged,
    nothing is returned: the storage itself may be at fault.
    """
    complete: list[AnyPath] = []
    for index, folder in enumerate(newest_first):
        damage = damage_of(folder)
        if damage:
            logger.warning("%s is damaged and is neither counted nor removed (%s)", folder, damage)
            if index == 0:
                return []
        else:
            complete.append(folder)
    return [folder for folder in reversed(complete[keep:]) if folder not in protected]


def remove(chosen: Sequence[AnyPath], aside: str = find.DROPPED) -> list[AnyPath]:
    """Remove the folders ``chosen`` and return those that were removed. A warning names each one
    that cannot be removed.
    """
    removed = []
    for folder in chosen:
        try:
            drop(folder, aside)
        except OSError as error:
            logger.warning(
                "could not delete old checkpoint %s: %s",
                folder,
                failures.describe_error(error, folder),
            )
        else:
            removed.append(folder)
    return removed


def drop(folder: AnyPath, aside: str = find.DROPPED) -> None:
    """Remove ``folder``. It is renamed first, so that no partial checkpoint ever has its name.
    Raises OSError.

    ``aside`` is the prefix of its name meanwhile, optionally with a folder in front.
    """
    if storage.is_remote(folder):
        # first: without its manifest what is left is never taken for a complete checkpoint
        object_store.remove_objects([folder / MANIFEST_NAME])
        object_store.remove_objects(object_store.objects_in(folder))
        return
    discard_replaced(folder)
    away = folder.parent / (aside + folder.name)
    storage.remove_tree(away)
    storage.rename_durably(folder, away)
    storage.remove_tree(away)


def _stem(folder: AnyPath) -> str:
    if folder.name.startswith(".") or folder.is_symlink():
        return ""
    return re.sub(r"\d+", "#", folder.name)
