"""Checkpoints that a thread of this process is writing, and what is to be done once they are
whole: old ones may go no sooner.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from hf_zero.checkpoint.places import Place, is_remote

Action = Callable[[], object]

_lock = threading.Lock()
_pending: dict[Place, list[Action]] = {}


def begun(final: Place) -> None:
    """A thread is going to publish ``final``."""
    with _lock:
        _pending[final] = []


def ended(final: Place, whole: bool) -> None:
    """``final`` is whole, and what waits for it is done now; or nothing has come of it, and that
    is left undone.
    """
    with _lock:
        actions = _pending.pop(final, [])
    for action in actions if whole else ():
        action()


def lies_in(final: Place, folder: Path) -> bool:
    """Whether the checkpoint ``final`` is in ``folder``, however deep; one in an object store is
    in no folder.
    """
    return not is_remote(final) and final.parent.resolve().is_relative_to(folder.resolve())


def once_whole(folder: Path, action: Action) -> None:
    """Run ``action`` when nothing is being written in ``folder``: now, or from the thread that
    writes there, before its save is over.

    Where a save in ``folder`` fails the action is not run: what it would remove is still needed.
    Only the process that publishes knows of a save, which is rank 0's.
    """
    with _lock:
        final = next((each for each in _pending if lies_in(each, folder)), None)
        if final is not None:
            _pending[final].append(lambda: once_whole(folder, action))
            return
    action()
