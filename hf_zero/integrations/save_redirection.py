"""Other folders in place of those that frameworks save in and load from, in this process."""

from __future__ import annotations

import os
from collections.abc import Callable

_redirection: Callable[[str], str] | None = None


def redirect_saves(redirection: Callable[[str], str] | None) -> None:
    """Have the folders that frameworks save in and load from be those that ``redirection`` returns
    for them, in this process. None: they stay.
    """
    global _redirection
    _redirection = redirection


def save_folder(folder: str | os.PathLike[str]) -> str:
    """Return the folder in which a save into ``folder`` is written."""
    return os.fspath(folder) if _redirection is None else _redirection(os.fspath(folder))


def load_folder(folder: str | os.PathLike[str]) -> str:
    """Return the folder from which a load of ``folder`` reads: where a save has been redirected to,
    if there was one.
    """
    redirected = save_folder(folder)
    return redirected if os.path.exists(redirected) else os.fspath(folder)
