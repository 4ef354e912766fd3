"""Failures of saves and loads: errors in words, with a remedy, and actions that succeed on all
ranks or raise on all.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hf_zero.errors import CheckpointError

if TYPE_CHECKING:
    from hf_zero.distributed.mesh import Mesh
    from hf_zero.distributed.world_group import RankGroup
from hf_zero.checkpoint.storage import AnyPath

T = TypeVar("T")


_REMEDIES = {
    errno.ENOSPC: "the disk is full: free space or save into another folder",
    errno.EDQUOT: "the quota is used up: free space or save into another folder",
    errno.EACCES: "make the folder writable for this user or choose another one",
    errno.EPERM: "make the folder writable for this user or choose another one",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.ENOENT: "the folder must be on storage that all ranks share, and nobody "
    "may remove it meanwhile",
    errno.EEXIST: "this is a file, and a folder is needed: choose another folder",
    errno.ENOTDIR: "this is a file, and a folder is needed: choose another folder",
    errno.EISDIR: "this is a folder, and a file is needed: choose another folder",
}


def describe_error(error: BaseException, path: object = None) -> str:
    """Return one line: what was wrong, in which file (by default ``path``), and what to do."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError):
        file = error.filename if error.filename is not None else path
        remedy = _REMEDIES.get(error.errno or 0, "check the storage, then try again")
        return f"{file}: {error.strerror or error}; {remedy}"
    return f"{type(error).__name__}: {error}" + (f" ({path})" if path is not None else "")


@contextmanager
def checkpoint_errors(path: object) -> Iterator[None]:
    """Convert an OSError into a CheckpointError; ``path`` is the file to name where it has none."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(describe_error(error, path)) from error


def describe_failures(failed: Mapping[int, str], world: int) -> str:
    """Return one line for the ranks that failed, out of ``world``: rank -> text in ``failed``. A
    text that all ranks share is given once, without ranks.
    """
    texts = list(dict.fromkeys(failed.values()))
    if len(failed) == world and len(texts) == 1:
        return texts[0]
    shown = list(failed.items())[:4]
    more = f" (and {len(failed) - len(shown)} more ranks)" if len(failed) > len(shown) else ""
    return "; ".join(f"rank {rank}: {text}" for rank, text in shown) + more


def collective_try(
    mesh: Mesh | RankGroup,
    action: Callable[[], T],
    path: AnyPath = None,
    after: str = "",
    share: Callable[[T], object] | None = None,
) -> tuple[T, list[Any]]:
    """Run ``action`` on every rank. Return this rank's result, and by rank the part of each result
    that ``share`` returns (None without it). Collective.

    If ``action`` raised on any rank, all ranks raise one CheckpointError that names these ranks and
    their errors. ``path`` is the file to name where an error has none; ``after`` is appended to the
    message and says what still holds.
    """
    cause: BaseException | None = None
    try:
        value_here = action()
        outcome: tuple[bool, Any] = (True, None if share is None else share(value_here))
    except Exception as error:
        cause, outcome = error, (False, describe_error(error, path))
    outcomes = mesh.all_gather_object(outcome)
    failed = {rank: text for rank, (ok, text) in enumerate(outcomes) if not ok}
    if not failed:
        return value_here, [value for _, value in outcomes]
    message = describe_failures(failed, len(outcomes))
    raise CheckpointError(message + (f". {after}" if after else "")) from cause


def decide_on_rank_0(world: RankGroup, choose: Callable[[], T]) -> T:
    """Return the result of ``choose()`` on rank 0 of the group ``world`` to all ranks. Collective.

    If ``choose`` raises, all ranks raise a CheckpointError with its error.
    """
    cause: Exception | None = None
    answer: tuple[T | None, str] = (None, "")
    if world.rank == 0:
        try:
            answer = choose(), ""
        except Exception as error:
            cause, answer = error, (None, describe_error(error))
    chosen, failure = world.broadcast_object(answer, what="the choice of rank 0")
    if failure:
        raise CheckpointError(failure) from cause
    return cast(T, chosen)
