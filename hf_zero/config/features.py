"""The table of features: what switches each of them on, the order in which they are applied, and
what they do not go with.

``features.toml`` is the one place that knows all features; the core reads it, and imports none.
"""

from __future__ import annotations

import importlib
import json
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from hf_zero.config.keys import KEYS
from hf_zero.errors import ConfigError
from hf_zero.logging import JsonObject

TABLE = Path(__file__).with_suffix(".toml")


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
    content: bool = False
    trains: bool = False
    make: str = ""
    extends: str = ""
    sets: Mapping[str, object] = field(default_factory=dict)
    early: str = ""
    loads: str = ""
    provides: Mapping[str, str] = field(default_factory=dict)
    declares: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    excludes: Mapping[str, str] = field(default_factory=dict)
    refuses: tuple[RefusedValue, ...] = ()

    def is_on(self, values: Mapping[str, object]) -> bool:
        """Return whether ``values``, by key, switch the feature on."""
        if any(_value(values, key) in refused for key, refused in self.off.items()):
            return False
        return any(_value(values, key) != KEYS[key].default for key in self.keys)


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
            yield from (name,) if name in tables else kinds[name]

    rows = {
        name: FeatureRow(
            name,
            entry["words"],
            entry["page"],
            entry.get("kind", ""),
            tuple(entry.get("keys", ())),
            {key: tuple(values) for key, values in entry.get("off", {}).items()},
            entry.get("always", False),
            entry.get("content", False),
            entry.get("trains", False),
            entry.get("make", ""),
            entry.get("extends", ""),
            entry.get("sets", {}),
            entry.get("early", ""),
            entry.get("loads", ""),
            entry.get("provides", {}),
            tuple(entry.get("declares", ())),
            tuple(members(entry.get("after", ()))),
            {m: why for other, why in entry.get("excludes", {}).items() for m in members((other,))},
            tuple(
                RefusedValue(
                    given["key"],
                    given["why"],
                    tuple(given.get("is", ())),
                    tuple(given.get("not", ())),
                )
                for given in entry.get("refuses", ())
            ),
        )
        for name, entry in tables.items()
    }
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


def switched_on(values: Mapping[str, object]) -> list[str]:
    """Return the names of the features that ``values``, by key, switch on."""
    return [name for name, row in FEATURES.items() if row.is_on(values)]


def computed_values(values: Mapping[str, object]) -> dict[str, JsonObject]:
    """Return the values of keys that the features which ``values`` switch on need, in the dialect,
    by the feature.
    """
    found: dict[str, JsonObject] = {}
    for name in switched_on(values):
        for key, value in FEATURES[name].sets.items():
            section, _, last = key.rpartition(".")
            found.setdefault(name, {}).setdefault(section, {})[last] = value
    return found


def reason(one: str, other: str) -> str:
    """Return why the features ``one`` and ``other`` do not go together; "" if they do."""
    return FEATURES[one].excludes.get(other) or FEATURES[other].excludes.get(one) or ""


def conflicts(name: str, on: Collection[str], values: Mapping[str, object]) -> list[str]:
    """Return what the feature ``name`` does not go with, each with the reason: of the features
    ``on``, and of ``values`` by key.
    """
    found = [f"{other}: {why}" for other in on if other != name and (why := reason(name, other))]
    for value in FEATURES[name].refuses:
        if value.applies(given := _value(values, value.key)):
            shown = given if isinstance(given, str) else json.dumps(given)
            found.append(f"{value.key}: {shown}: {value.why}")
    return found


def check_combination(on: Collection[str], values: Mapping[str, object]) -> None:
    """Raise ConfigError for features ``on`` that do not go together, or with ``values`` by key: one
    error, which names all conflicts.
    """
    sentences, named = [], set[str]()
    for name in on:
        others = [other for other in on if other not in named]
        if found := conflicts(name, others, values):
            sentences.append(f"{name} does not go with {'; nor with '.join(found)}")
        named.add(name)
    if sentences:
        raise ConfigError(". ".join(sentences))


def refused_values(values: Mapping[str, object]) -> dict[str, str]:
    """Return, by key, why ``initialize`` refuses ``values``, as far as the keys show it."""
    on = [name for name in switched_on(values) if not FEATURES[name].content]
    reasons: dict[str, str] = {}
    for at, name in enumerate(on):
        if found := conflicts(name, on[at + 1 :], values):
            row = FEATURES[name]
            written = next((key for key in row.keys if key in values), name)
            reasons[written] = f"{name} does not go with {'; nor with '.join(found)}"
    return reasons


def _value(values: Mapping[str, object], key: str) -> object:
    return values.get(key, KEYS[key].default)


def combinations() -> str:
    """Return Markdown: a row for each feature, with what it does not go with."""
    lines = ["| feature | does not go with |", "| --- | --- |"]
    for name, row in FEATURES.items():
        found = [
            f"{FEATURES[other].words}: {why.partition(';')[0]}"
            for other in FEATURES
            if other != name and (why := reason(name, other))
        ]
        for value in row.refuses:
            given = " or ".join(map(json.dumps, value.refused or value.allowed))
            shown = f"`{value.key}` {'other than ' if value.allowed else ''}{given}"
            found.append(f"{shown}: {value.why.partition(';')[0]}")
        if row.keys or found:
            lines.append(f"| [{row.words}]({row.page}.md) | {'; '.join(found) or '–'} |")
    return "\n".join(lines)
