"""Tensors chosen by patterns over their names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from hf_zero.checkpoint.outputs import Output
from hf_zero.errors import ConfigError


def choose(
    held: Sequence[Output], only: str | Sequence[str] | None, remedy: str = ""
) -> list[Output]:
    """Of ``held`` those whose name, as it is written or as it is held, fits one of the patterns
    ``only`` (``*``, ``?``, ``[…]``).

    ``remedy`` is added to the message of a pattern that fits nothing. Raises ConfigError naming it
    and the names that are near.
    """
    if only is None:
        return list(held)
    patterns = [only] if isinstance(only, str) else list(only)
    if not patterns:
        raise ConfigError(
            "only=[] chooses nothing; pass patterns over the names of tensors, or none at all"
        )
    chosen: set[int] = set()
    for pattern in patterns:
        fitting = {
            place
            for place, output in enumerate(held)
            if fnmatchcase(output.name, pattern) or fnmatchcase(output.held, pattern)
        }
        if not fitting:
            raise ConfigError(
                f"only={pattern!r} fits no tensor; "
                f"{_near(pattern, [output.name for output in held])}{remedy}"
            )
        chosen |= fitting
    return [output for place, output in enumerate(held) if place in chosen]


def _near(pattern: str, names: Sequence[str]) -> str:
    bare = pattern.strip("*")
    near = [
        name for name in names if bare and bare.lower() in name.lower()
    ] or difflib.get_close_matches(bare, names, 3, 0.4)
    found = ", ".join((near or list(names))[:3])
    return (
        f"names near it are {found}"
        if near
        else f"there are {len(names)} names, such as {found}"
        if names
        else "there are none"
    )
