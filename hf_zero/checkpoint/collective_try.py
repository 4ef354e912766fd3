"""Actions that succeed on all ranks or raise on all, so that no rank waits for one that raised."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hf_zero.errors import CheckpointError

T = TypeVar("T")

_REMEDIES = {
    errno.ENOSPC: "the disk is full: free space or save into another folder",
    errno.EDQUOT: "the quota is used up: free space or save into another folder",
    errno.EACCES: "make the folder writable for this user or choose another one",
    errno.EPERM: "make the folder writable for this user or choose another one",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.ENOENT: "the folder must be on storage that all ranks share, and nobody "
    "may remove it meanwhile",
    errno.EEXIST: "a file stands where a folder is needed: choose another folder",
    errno.ENOTDIR: "a file stands where a folder is needed: choose another folder",
    errno.EISDIR: "a folder stands where a file is needed: choose another folder",
}


def describe_error(error: BaseException, path: Any = None) -> str:
    """Return one line: what was wrong, in which file (by default ``path``), and what to do."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError):
        file = error.filename if error.filename is not None else path
        remedy = _REMEDIES.get(error.errno or 0, "check the storage, then try again")
        return f"{file}: {error.strerror or error}; {remedy}"
    return f"{type(error).__name__}: {error}" + (f" ({path})" if path is not None else "")


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
    mesh: Any, action: Callable[[], T], path: Any = None, after: str = ""
) -> list[T]:
    """Run ``action`` on every rank, exchange the outcomes, and return the results by rank.
    Collective.

    If ``action`` raised on any rank, all ranks raise one CheckpointError that names these ranks and
    their errors. ``path`` is the file to name where an error has none; ``after`` is appended to the
    message and says what still holds.
    """
    cause: BaseException | None = None
    try:
        outcome: tuple[bool, Any] = (True, action())
    except Exception as error:
        cause, outcome = error, (False, describe_error(error, path))
    outcomes = mesh.all_gather_object(outcome)
    failed = {rank: text for rank, (ok, text) in enumerate(outcomes) if not ok}
    if not failed:
        return [value for _, value in outcomes]
    message = describe_failures(failed, len(outcomes))
    raise CheckpointError(message + (f". {after}" if after else "")) from cause
