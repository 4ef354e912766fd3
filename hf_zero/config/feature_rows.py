"""The rows of ``features.toml``, the one place that knows all features: how they are read and put
in the order in which features are applied.

The core reads these rows and imports no feature: a row names modules as text. ``keys.py`` reads the
sections of features here, so this module imports no key; ``features.py`` has what depends on keys,
such as which features are on.

In a :class:`FeatureRow`, unlike in the file, the lists are tuples; a ``kind`` in ``after`` and
``excludes`` is replaced by the features of that kind; and both leave out features whose rows were
removed from the package.
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

from hf_zero.errors import ConfigError

TABLE = Path(__file__).with_name("features.toml")


@dataclass(frozen=True)
class RefusedValue:
    """Values of ``key`` that a feature does not go with: those in ``refused``, or all that are not
    in ``allowed``. They are compared by ``==``, by which 1 is true and 0 is false.
    """

    key: str
    why: str
    refused: tuple[object, ...] = ()
    allowed: tuple[object, ...] = ()

    def applies(self, value: object) -> bool:
        return value not in self.allowed if self.allowed else value in self.refused


@dataclass(frozen=True)
class FeatureRow:
    """One feature: a field for each column of ``features.toml``, whose head tells authors of rows
    when to fill it in. Text of the form ``module:name`` is passed to :meth:`load`.
    """

    name: str  # in code, in messages and in other rows
    words: str  # what it does, for documentation
    page: str  # of the documentation
    kind: str = ""  # a group of features, which other rows may name

    # when it is on
    keys: tuple[str, ...] = ()  # if one of them has another value than its default ...
    off: Mapping[str, tuple[object, ...]] = field(default_factory=dict)  # ... and none has these
    decided: str = ""  # in place of both: module:name of a function of all values by key
    always: bool = False  # ``make`` is called whether it is on or not
    trains: bool = False  # only beside an optimizer
    sets: Mapping[str, object] = field(default_factory=dict)  # values of keys that it implies

    # what it consists of
    sections: tuple[str, ...] = ()  # module:name of the classes of its keys
    make: str = ""  # module:name of the factory of its object (``Feature``) for a configuration
    early: str = ""  # module:name of the class that acts before it is known what is on
    extends: str = ""  # module:name of the function that returns its part of a plan
    loads: str = ""  # module:name of the function that returns options of the data loader
    provides: Mapping[str, str] = field(default_factory=dict)  # module:name by name of a service
    dialects: tuple[str, ...] = ()  # module:name of classes that read configurations
    kernels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # devices by kernel
    declares: tuple[str, ...] = ()  # packages whose models have properties that read no parameter

    # what it has to do with other features
    after: tuple[str, ...] = ()  # those that are applied before it
    excludes: Mapping[str, str] = field(default_factory=dict)  # the reason and a remedy, by name
    refuses: tuple[RefusedValue, ...] = ()  # values of keys that it does not go with

    def load(self, target: str) -> Any:
        """Return the function, class or module ``target``, one of this row. Raises ConfigError if
        its module imports a library that is not installed.
        """
        try:
            return loaded(target)
        except ModuleNotFoundError as error:
            library = (error.name or "hf_zero").partition(".")[0]
            if library == "hf_zero":
                raise
            raise ConfigError(
                f"{self.name} ({self.words}) needs {library}, which is not installed; "
                f"pip install {library}, or remove what switches the feature on"
            ) from error


def read(text: str) -> dict[str, FeatureRow]:
    """Return the rows of ``features.toml`` by name, in the order in which they are applied: that of
    the file, but each after what its ``after`` names.
    """
    tables: Mapping[str, Mapping[str, Any]] = tomllib.loads(text)
    rows = {name: _row(name, entry, tables) for name, entry in tables.items()}
    ordered: dict[str, FeatureRow] = {}

    def place(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"features stand after each other: {' > '.join((*path, name))}"
        if name not in ordered:
            for earlier in rows[name].after:
                place(earlier, (*path, name))
            ordered[name] = rows[name]

    for name in rows:
        place(name, ())
    return ordered


def _row(
    name: str, entry: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]
) -> FeatureRow:
    def features(names: Iterable[str]) -> Iterator[str]:
        for given in names:
            of_kind = (each for each, table in tables.items() if table.get("kind") == given)
            yield from (given,) if given in tables else of_kind

    excluded = entry.get("excludes", {})
    values = with_tuples(entry) | {
        "off": with_tuples(entry.get("off", {})),
        "kernels": with_tuples(entry.get("kernels", {})),
        "after": tuple(features(entry.get("after", ()))),
        "excludes": {each: why for other, why in excluded.items() for each in features([other])},
        "refuses": tuple(
            RefusedValue(of["key"], of["why"], tuple(of.get("is", ())), tuple(of.get("not", ())))
            for of in entry.get("refuses", ())
        ),
    }
    return FeatureRow(name, **values)


def with_tuples(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``entry`` of a table with tuples in place of its lists."""
    return {key: tuple(of) if isinstance(of, list) else of for key, of in entry.items()}


FEATURES: Mapping[str, FeatureRow] = read(TABLE.read_text("utf-8"))


def loaded(name: str) -> Any:
    """Return the function or class that a row names as ``module:name``, or the module."""
    module, _, attribute = name.partition(":")
    found = importlib.import_module(module)
    return attrgetter(attribute)(found) if attribute else found


@cache
def provided(name: str, default: Any = None) -> Any:
    """Return the function, class or module that a row provides as ``name``: of an upper layer, for
    lower ones that meet a model of its library, or the state of its feature; ``default`` without
    such a row. Raises ConfigError without either.
    """
    for row in FEATURES.values():
        if name in row.provides:
            return row.load(row.provides[name])
    if default is None:
        raise ConfigError(
            f"no feature of this package provides {name!r}; install hf-zero with the row of "
            f"{TABLE} that does"
        )
    return default


class FeatureSection:
    """A section of keys of a feature: a frozen dataclass whose fields declare them, in a module
    that imports ``hf_zero.config`` alone; a row of the table names it.
    """

    FIELD: ClassVar[str]
    """Its name as a keyword of ``ZeroConfig``."""
    SECTION_PATH: ClassVar[str]
    """Its path in a configuration."""
    SPELLINGS: ClassVar[Mapping[str, str]] = {}
    """Other spellings of its keys, and their paths."""

    SECRETS: ClassVar[tuple[str, ...]] = ()
    """Keys of it whose values are not shown."""

    @classmethod
    def complete(cls, reading: Any) -> None:
        """Derive, in place, values of ``reading``, a ``ConfigReading``, from other written keys."""

    @classmethod
    def check_reading(cls, reading: Any) -> None:
        """Record contradictions between the values of ``reading``."""


SECTIONS: tuple[type[FeatureSection], ...] = tuple(
    loaded(name) for row in FEATURES.values() for name in row.sections
)
"""The sections of all features."""

SECRETS = frozenset(path for section in SECTIONS for path in section.SECRETS)
"""Keys whose values are not shown."""
