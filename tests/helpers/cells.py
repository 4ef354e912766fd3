"""Which cells of a matrix the fast suite runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def fast(cells: Iterable[Any], often: Callable[..., bool]) -> list[Any]:
    """``cells`` (tuples, or single values) as parameters; where ``often(*cell)`` is false the
    long suite alone runs them.
    """
    chosen = []
    for cell in cells:
        values = cell if isinstance(cell, tuple) else (cell,)
        chosen.append(pytest.param(*values, marks=() if often(*values) else pytest.mark.long))
    assert any(not each.marks for each in chosen), "the fast suite would run none of these cells"
    return chosen
