"""Which checkpoints go when a new one has come.

Damaged ones are not counted and not removed: what is left of them may be all there is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from hf_zero.checkpoint import commit, find, storage
from hf_zero.checkpoint.collective_try import describe_error
from hf_zero.checkpoint.find import integrity_error
from hf_zero.checkpoint.storage import AnyPath, is_remote
from hf_zero.errors import CheckpointError
from hf_zero.logs import logger


def check_keep(keep: int | None) -> None:
    """Raises CheckpointError for a number of checkpoints that cannot be kept."""
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise CheckpointError(
            f"keep={keep!r} is no number of checkpoints; pass 1 or more, or None to keep all"
        )


def retain(final: AnyPath, keep: int) -> list[AnyPath]:
    """Keep ``final``, just saved, and the newest whole checkpoints beside it: ``keep`` in all.
    Returns those that were removed.

    Only tags that differ from its own by their numbers alone are looked at (``global_step100``
    beside ``global_step200``; ``best`` stays), and the one that ``latest`` names stays too. What
    cannot be removed is a warning: the save itself is good.
    """
    family = [
        folder
        for folder in final.parent.iterdir()
        if _stem(folder) == _stem(final) and find.is_checkpoint(folder)
    ]
    newest_first = sorted(
        family, key=lambda folder: (folder == final, find.age_key(folder)), reverse=True
    )
    protected = {final}
    if (final.parent / find.LATEST).exists():
        try:
            protected.add(final.parent / find.latest_tag(final.parent))
        except CheckpointError as error:
            logger.warning("nothing is removed, although newer checkpoints are kept: %s", error)
            return []
    return remove(excess(newest_first, keep, protected, integrity_error))


def excess(
    newest_first: Iterable[AnyPath],
    keep: int,
    protected: set[AnyPath],
    wrong: Callable[[AnyPath], str],
) -> list[AnyPath]:
    """Those of ``newest_first`` that are whole and beyond the first ``keep`` whole ones, the oldest
    first.

    ``wrong`` says what is wrong with one, or "". If the newest is damaged nothing goes: something
    is the matter with the storage.
    """
    whole: list[AnyPath] = []
    for at, folder in enumerate(newest_first):
        said = wrong(folder)
        if said:
            logger.warning("%s is damaged and is neither counted nor removed (%s)", folder, said)
            if at == 0:
                return []
        else:
            whole.append(folder)
    return [folder for folder in reversed(whole[keep:]) if folder not in protected]


def remove(chosen: Sequence[AnyPath], aside: str = find.DROPPED) -> list[AnyPath]:
    """Drop each of ``chosen``; one that cannot be removed is named in a warning.

    Returns those that went.
    """
    gone = []
    for folder in chosen:
        try:
            drop(folder, aside)
        except OSError as error:
            logger.warning(
                "%s is to be removed, since newer checkpoints are kept, but cannot be: %s",
                folder,
                describe_error(error, folder),
            )
        else:
            gone.append(folder)
    return gone


def drop(folder: AnyPath, aside: str = find.DROPPED) -> None:
    """Remove ``folder``: renamed first, so that at no moment a half of it stands under its name.
    Raises OSError.

    ``aside`` goes before the name meanwhile, possibly with a folder in front.
    """
    if is_remote(folder):
        commit.drop_objects(folder)
        return
    commit.discard_replaced(folder)
    away = folder.parent / (aside + folder.name)
    storage.remove_tree(away)
    storage.rename_durably(folder, away)
    storage.remove_tree(away)


def _stem(folder: AnyPath) -> str:
    return (
        ""
        if folder.name.startswith(".") or folder.is_symlink()
        else re.sub(r"\d+", "#", folder.name)
    )
