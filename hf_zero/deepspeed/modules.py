"""The modules and names of DeepSpeed that hf-zero provides, read from ``modules.toml``.

``facade.py`` makes the modules; a name is imported when it is first used. To provide another name,
add it to the table of its module; its code belongs in a file of this folder or in the package that
does the work. Imported with ``deepspeed``: standard library only.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from hf_zero.deepspeed.stated_version import caller
from hf_zero.errors import NotBuiltError
from hf_zero.logging import JsonObject

HERE = __name__.rpartition(".")[0]


@dataclass(frozen=True)
class Provided:
    """A name that is an attribute of a module of hf-zero, of torch or of the facade itself."""

    home: str
    attribute: str

    def load(self, dotted: str) -> object:
        """Import the home and return the object."""
        return getattr(import_module(self.home), self.attribute)


@dataclass(frozen=True)
class NotBuilt:
    """A known but unavailable name: it imports, and raises NotBuiltError when it is used."""

    kind: str
    """``functions``, ``classes``, or ``optimizers`` for classes that derive from torch's."""
    remedy: str

    def load(self, dotted: str) -> Callable[..., object]:
        """Return the function or class named ``dotted`` that raises NotBuiltError."""
        if self.kind == "functions":
            return function(dotted, self.remedy)
        if self.kind == "optimizers":
            return class_of(dotted, self.remedy, import_module("torch.optim").Optimizer)
        return class_of(dotted, self.remedy)


@dataclass(frozen=True)
class Module:
    """A module of the facade."""

    path: str
    about: str
    names: dict[str, Provided | NotBuilt]
    left_out: dict[str, str]
    """Names that are missing, and the reasons; ``*`` has the reason of every other name."""
    others: str
    """``module:attribute`` of the object that has every name which is not in ``names``."""
    command: str
    """``module:function`` that ``python -m`` calls."""

    def why_not(self, name: str) -> str:
        """Return why ``name`` is left out; "" if no table says it."""
        return self.left_out.get(name) or self.left_out.get("*", "")


Tables = dict[str, JsonObject]


def rows(tables: Tables, path: str, section: str) -> Iterator[tuple[str, str]]:
    """Yield (key, name) of a section of the table ``path`` and of the tables that it includes."""
    for included in tables[path].get("with", ()):
        yield from rows(tables, included, section)
    for key, names in tables[path].get(section, {}).items():
        yield from ((key, name) for name in names.split())


def absolute(home: str) -> str:
    return f"{HERE}{home}" if home.startswith(".") else home


def read(tables: Tables) -> tuple[dict[str, Module], dict[str, dict[str, str]], dict[str, str]]:
    """Return the modules by their paths; by class the names that it lacks, with the reasons; and
    the modules that are missing, with the reasons, which count for modules inside them, too.
    """
    reasons: JsonObject = tables.pop("reasons")

    def left_out(path: str) -> dict[str, str]:
        return {name: reasons.get(key, key) for key, name in rows(tables, path, "left_out")}

    def module(path: str) -> Module:
        names: dict[str, Provided | NotBuilt] = {}
        for home, name in rows(tables, path, "names"):
            name, _, attribute = name.partition("=")
            names[name] = Provided(absolute(home), attribute or name)
        for kind in ("functions", "classes", "optimizers"):
            for key, name in rows(tables, path, f"{kind}_not_built"):
                names[name] = NotBuilt(kind, reasons.get(key, key))
        table = tables[path]
        command = absolute(table.get("command", ""))
        return Module(path, table["about"], names, left_out(path), table.get("others", ""), command)

    classes = {path: left_out(path) for path in tables if path.startswith("DeepSpeed")}
    missing = left_out("missing modules")
    return {path: module(path) for path in tables if "about" in tables[path]}, classes, missing


API, LEFT_OUT, MISSING = read(tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")))


def refuse(name: str, remedy: str) -> NoReturn:
    line = caller()
    raise NotBuiltError(
        f"{name} is not built in this version of hf-zero; {remedy}{line and f' ({line} uses it)'}"
    )


def function(name: str, remedy: str) -> Callable[..., NoReturn]:
    """Return a function with the dotted ``name`` that raises NotBuiltError when called."""

    def missing(*args: object, **kwargs: object) -> NoReturn:
        refuse(name, remedy)

    missing.__module__, _, missing.__name__ = name.rpartition(".")
    missing.__qualname__ = missing.__name__
    missing.__doc__ = f"Not built: {remedy}."
    return missing


def class_of(name: str, remedy: str, *bases: type) -> type:
    """Return a class with the dotted ``name``, usable in ``isinstance``, that raises NotBuiltError
    when constructed or asked for a method.
    """

    class Meta(type(bases[0]) if bases else type):  # type: ignore[misc]
        def __getattr__(cls, attribute: str) -> NoReturn:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            refuse(f"{name}.{attribute}", remedy)

    def __init__(self: object, *args: object, **kwargs: object) -> None:
        refuse(name, remedy)

    module, _, short = name.rpartition(".")
    members = {"__init__": __init__, "__module__": module, "__doc__": f"Not built: {remedy}."}
    return Meta(short, bases, members)
