"""Lookup of what the two harnesses of the kernels need of Triton: the checked interpreter
(helpers/checked_triton.py) and the ahead-of-time gate (helpers/aot_gate.py).

Both use parts of Triton that have no stable interface, so they look up each name and each argument
before the first kernel runs, and bind arguments by name.
"""

from __future__ import annotations

import inspect
from typing import Any

SUPPORTED = ("3.7.1", "3.8.0", "3.9.0")


class UnsupportedTriton(Exception):
    """The installed release of Triton lacks a name or an argument that a harness needs."""


def needed(owner: Any, path: str, *arguments: str) -> Any:
    """Return the attribute of ``owner`` at the dotted ``path``.

    Args:
        owner: a module, a class or an object of Triton.
        arguments: names of parameters that the attribute must have.

    Raises:
        UnsupportedTriton: the attribute or one of the parameters is missing.
    """
    value, full = owner, f"{_name(owner)}.{path}"
    for name in path.split("."):
        if not hasattr(value, name):
            raise UnsupportedTriton(_lacks(full))
        value = getattr(value, name)
    for name in arguments:
        if name not in inspect.signature(value).parameters:
            raise UnsupportedTriton(_lacks(f"the argument {name!r} of {full}"))
    return value


def _name(owner: Any) -> str:
    if inspect.ismodule(owner):
        return owner.__name__
    kind = owner if inspect.isclass(owner) else type(owner)
    return f"{kind.__module__}.{kind.__qualname__}"


def _lacks(missing: str) -> str:
    import triton  # not above: the gate decides first whether the interpreter is on

    return (
        f"Triton {triton.__version__} lacks {missing}, which the tests of the kernels need; "
        f"install triton {', '.join(SUPPORTED[:-1])} or {SUPPORTED[-1]}"
    )
