"""Names of DeepSpeed that are known and not provided: they import, and say so when they are
used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from hf_zero.errors import NotBuiltError


def refuse(name: str, instead: str) -> NoReturn:
    raise NotBuiltError(f"{name} is not built in this version of hf-zero; {instead}")


def function(name: str, instead: str) -> Callable[..., Any]:
    """A function of that name that raises NotBuiltError when called."""

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        refuse(name, instead)

    missing.__name__ = missing.__qualname__ = name.rpartition(".")[2]
    missing.__doc__ = f"Not built: {instead}."
    return missing


def type_of(name: str, instead: str, *bases: type) -> type:
    """A class of that name, good for ``isinstance``, that raises NotBuiltError when constructed
    or asked for a method.
    """

    class Meta(type(bases[0]) if bases else type):  # type: ignore[misc]
        def __getattr__(cls, attribute: str) -> NoReturn:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            refuse(f"{name}.{attribute}", instead)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse(name, instead)

    return Meta(
        name.rpartition(".")[2], bases, {"__init__": __init__, "__doc__": f"Not built: {instead}."}
    )
