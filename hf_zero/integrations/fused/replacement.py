"""One change made to one module of a model: what it is, where it is, and how it is undone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Replacement:
    """``what`` names the kernel ("linear_cross_entropy"), ``where`` the module as ``named_modules``
    does ("lm_head"; "" is the model).

    ``undo`` puts back what was there and may be called twice. Parameters and their names are never
    part of a replacement.
    """

    what: str
    where: str
    undo: Callable[[], None]
