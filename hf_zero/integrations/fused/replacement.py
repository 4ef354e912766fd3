"""A change to a module of a model, and how it is undone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Replacement:
    """``what`` names the kernel ("linear_cross_entropy"), ``where`` the module as ``named_modules``
    does ("lm_head"; "" is the model).

    ``undo`` restores the module, and may be called twice. Parameters and their names do not change.
    """

    what: str
    where: str
    undo: Callable[[], None]
