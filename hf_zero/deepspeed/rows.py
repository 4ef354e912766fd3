"""The rows of the table in ``api.py``: a module of DeepSpeed, its names, and the origin of each, or
the remedy where it is missing.

Imported with ``deepspeed``: standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

from hf_zero.errors import NotBuiltError

HERE = __name__.rpartition(".")[0]


@dataclass(frozen=True)
class Provided:
    """A name that is an attribute of a module of hf-zero, of torch or of the facade itself."""

    name: str
    home: str
    attribute: str

    def load(self, module: str) -> Any:
        """Import the home and return the object. ``module``: the facade's module with the name."""
        return getattr(import_module(self.home), self.attribute)


@dataclass(frozen=True)
class NotBuilt:
    """A known but unavailable name: it imports, and raises NotBuiltError when it is used.

    ``instead`` ends the sentence of that error.
    """

    name: str
    instead: str
    is_class: bool
    base: str = ""
    """``module:class`` that the class derives from, for ``issubclass``."""

    def load(self, module: str) -> Any:
        """Return a function or class that raises NotBuiltError when it is called."""
        dotted = f"{module}.{self.name}"
        if not self.is_class:
            return function(dotted, self.instead)
        home, _, attribute = self.base.partition(":")
        bases = (getattr(import_module(home), attribute),) if home else ()
        return type_of(dotted, self.instead, *bases)


@dataclass(frozen=True)
class LeftOut:
    """A name of DeepSpeed that is missing here, and why; access raises AttributeError."""

    name: str
    reason: str


Row = Provided | NotBuilt | LeftOut


@dataclass(frozen=True)
class Module:
    """A module of the facade."""

    path: str
    about: str
    names: dict[str, Provided | NotBuilt]
    left_out: dict[str, str]
    others: str
    """``module:attribute`` of the module that has every name which is not in ``names``."""
    command: str
    """``module:function`` that ``python -m`` calls."""

    def why_not(self, name: str) -> str:
        """Return why ``name`` is left out; "" if no row has it. ``*`` matches every other name."""
        return self.left_out.get(name) or self.left_out.get("*", "")


def module(
    path: str,
    about: str,
    *rows: Iterable[Row],
    others: str = "",
    command: str = "",
) -> Module:
    """Return a row of the table; ``rows`` are results of the functions below."""
    found = [row for part in rows for row in part]
    left_out = {row.name: row.reason for row in found if isinstance(row, LeftOut)}
    there = {row.name: row for row in found if not isinstance(row, LeftOut)}
    return Module(path, about, there, left_out, others, _absolute(command))


def names(home: str, *wanted: str) -> list[Provided]:
    """Return rows of the attributes of ``home``, ".file" for one of this folder. Each text may hold
    several, as ``name``, or ``name=attribute`` where they differ.
    """
    parted = [word.partition("=") for word in _split(wanted)]
    return [Provided(name, _absolute(home), attribute or name) for name, _, attribute in parted]


def functions_not_built(instead: str, *wanted: str) -> list[NotBuilt]:
    """Return rows of names that raise NotBuiltError when called; each text may hold several."""
    return [NotBuilt(name, instead, is_class=False) for name in _split(wanted)]


def classes_not_built(instead: str, *wanted: str, base: str = "") -> list[NotBuilt]:
    """Return rows of classes that raise NotBuiltError when constructed or asked for a method."""
    return [NotBuilt(name, instead, is_class=True, base=base) for name in _split(wanted)]


def left_out(reason: str, *wanted: str) -> list[LeftOut]:
    """Return rows of names that do not exist; ``*``: all others of the module."""
    return [LeftOut(name, reason) for name in _split(wanted)]


def _absolute(home: str) -> str:
    return f"{HERE}{home}" if home.startswith(".") else home


def _split(wanted: Iterable[str]) -> list[str]:
    return [name for each in wanted for name in each.split()]


def lazily(home: str, attribute: str) -> Any:
    """Import and return an attribute of a module that is above the facade in the layers, or costly
    to import.
    """
    return getattr(import_module(home), attribute)


# ---- Names that are not built ----


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
