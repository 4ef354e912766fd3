"""Known but unavailable names of DeepSpeed: they import, and raise NotBuiltError when they are
used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from hf_zero.errors import NotBuiltError


def refuse(name: str, instead: str) -> NoReturn:
    raise NotBuiltError(f"{name} is not built in this version of hf-zero; {instead}")


def function(name: str, instead: str) -> Callable[..., Any]:
    """Return a function with the dotted ``name`` that raises NotBuiltError when called."""

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        refuse(name, instead)

    missing.__module__, _, missing.__name__ = name.rpartition(".")
    missing.__qualname__ = missing.__name__
    missing.__doc__ = f"Not built: {instead}."
    return missing


def type_of(name: str, instead: str, *bases: type) -> type:
    """Return a class with the dotted ``name``, usable in ``isinstance``, that raises NotBuiltError
    when constructed or asked for a method.
    """

    class Meta(type(bases[0]) if bases else type):  # type: ignore[misc]
        def __getattr__(cls, attribute: str) -> NoReturn:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            refuse(f"{name}.{attribute}", instead)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse(name, instead)

    module, _, own = name.rpartition(".")
    return Meta(
        own,
        bases,
        {"__init__": __init__, "__module__": module, "__doc__": f"Not built: {instead}."},
    )
