"""Functions of the package with a fault: an edit of their source."""

from __future__ import annotations

import inspect
import sys
import textwrap
from typing import Any

import pytest


def seed_fault(patch: pytest.MonkeyPatch, owner: Any, name: str, *edits: tuple[str, str]) -> None:
    """Replace the function ``name`` of ``owner``, a module or a class, by one with ``edits``: pairs
    of a text that occurs in its source and the text in its place.
    """
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    for text, other in edits:
        assert source.count(text) == 1, f"{name} has changed: seed its fault anew"
        source = source.replace(text, other)
    made: dict[str, Any] = {}
    names = vars(sys.modules[function.__module__])
    exec(compile("from __future__ import annotations\n" + source, name, "exec"), names, made)
    patch.setattr(owner, name, made[name])
