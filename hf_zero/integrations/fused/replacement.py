"""A reversible change to a module of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Replacement:
    """A change made by the kernel ``what`` ("linear_cross_entropy") in the module ``where``, named
    as by ``named_modules`` ("lm_head"; "" is the model).

    ``undo`` restores the module and is idempotent. Parameters and their names do not change.
    """

    what: str
    where: str
    undo: Callable[[], None]
