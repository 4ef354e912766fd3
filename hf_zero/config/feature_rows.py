"""The rows of the table of features. ``keys.py`` imports this module for the sections of features,
so it imports no key; ``features.py`` has what depends on keys.

``features.toml`` is the one place that knows all features; the core reads it, and imports none.
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Collection, Iterator, Mapping
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
    in ``allowed``.
    """

    key: str
    why: str
    refused: tuple[object, ...] = ()
    allowed: tuple[object, ...] = ()

    def applies(self, value: object) -> bool:
        return value not in self.allowed if self.allowed else value in self.refused


@dataclass(frozen=True)
class FeatureRow:
    """One feature; ``features.toml`` explains its fields. ``excludes``: why it does not go with
    others, by their names.
    """

    name: str
    words: str
    page: str
    kind: str = ""
    keys: tuple[str, ...] = ()
    off: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    always: bool = False
    decided: str = ""
    trains: bool = False
    make: str = ""
    extends: str = ""
    sets: Mapping[str, object] = field(default_factory=dict)
    early: str = ""
    loads: str = ""
    provides: Mapping[str, str] = field(default_factory=dict)
    declares: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    dialects: tuple[str, ...] = ()
    kernels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    excludes: Mapping[str, str] = field(default_factory=dict)
    refuses: tuple[RefusedValue, ...] = ()


def with_tuples(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row as a table has them, with tuples in place of its lists."""
    return {key: tuple(of) if isinstance(of, list) else of for key, of in entry.items()}


def read(text: str) -> dict[str, FeatureRow]:
    """Return the rows of ``features.toml`` by name, in the order in which they are applied: that of
    the file, but each after what its ``after`` names.
    """
    tables: Mapping[str, Mapping[str, Any]] = tomllib.loads(text)
    kinds: dict[str, list[str]] = {}
    for name, entry in tables.items():
        kinds.setdefault(entry.get("kind", ""), []).append(name)

    def members(names: Collection[str]) -> Iterator[str]:
        for name in names:
            # a feature whose row is removed is none that others stand after or exclude
            yield from (name,) if name in tables else kinds.get(name, ())

    def row(name: str, entry: Mapping[str, Any]) -> FeatureRow:
        values = with_tuples(entry)
        excluded = entry.get("excludes", {})
        values |= {
            "after": tuple(members(entry.get("after", ()))),
            "excludes": {m: why for other, why in excluded.items() for m in members((other,))},
            **{
                column: {key: tuple(of) for key, of in entry.get(column, {}).items()}
                for column in ("off", "kernels")
            },
            "refuses": tuple(
                RefusedValue(
                    given["key"],
                    given["why"],
                    tuple(given.get("is", ())),
                    tuple(given.get("not", ())),
                )
                for given in entry.get("refuses", ())
            ),
        }
        return FeatureRow(name, **values)

    rows = {name: row(name, entry) for name, entry in tables.items()}
    ordered: dict[str, FeatureRow] = {}

    def place(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"features stand after each other: {' > '.join((*path, name))}"
        for earlier in rows[name].after:
            place(earlier, (*path, name))
        ordered.setdefault(name, rows[name])

    for name in rows:
        place(name, ())
    return ordered


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
    given = [row.provides[name] for row in FEATURES.values() if name in row.provides]
    if not given and default is None:
        raise ConfigError(
            f"no feature of this package provides {name!r}; install hf-zero with the row of "
            f"{TABLE} that does"
        )
    return loaded(given[0]) if given else default


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
