"""The table of features: what switches each of them on, the order in which they are applied, and
what they do not go with.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

from hf_zero.config.feature_rows import FEATURES, FeatureRow, loaded
from hf_zero.config.keys import KEYS
from hf_zero.errors import ConfigError
from hf_zero.logging import JsonObject


def is_on(row: FeatureRow, values: Mapping[str, object]) -> bool:
    """Return whether ``values``, by key, switch the feature of ``row`` on."""
    if row.decided:
        return bool(loaded(row.decided)(values))
    if any(_value(values, key) in values_off for key, values_off in row.off.items()):
        return False
    return any(_value(values, key) != _default(key) for key in row.keys)


def switched_on(values: Mapping[str, object]) -> list[str]:
    """Return the names of the features that ``values``, by key, switch on."""
    return [name for name, row in FEATURES.items() if is_on(row, values)]


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


def conflicts_of_each(on: Sequence[str], values: Mapping[str, object]) -> dict[str, str]:
    """Return, by feature of ``on``, a sentence with its conflicts: with later ones of ``on``, and
    with ``values`` by key.
    """
    return {
        name: f"{name} does not go with {'; nor with '.join(found)}"
        for position, name in enumerate(on)
        if (found := conflicts(name, on[position + 1 :], values))
    }


def check_combination(on: Sequence[str], values: Mapping[str, object]) -> None:
    """Raise ConfigError for features ``on`` that do not go together, or with ``values`` by key: one
    error, which names all conflicts.
    """
    if sentences := [*conflicts_of_each(on, values).values()]:
        raise ConfigError(". ".join(sentences))


def refused_values(values: Mapping[str, object]) -> dict[str, str]:
    """Return, by key, why ``initialize`` refuses ``values``, as far as the keys show it."""
    return {
        next((key for key in FEATURES[name].keys if key in values), name): sentence
        for name, sentence in conflicts_of_each(switched_on(values), values).items()
    }


def _value(values: Mapping[str, object], key: str) -> object:
    return values.get(key, _default(key))


def _default(key: str) -> object:
    """Return the default of ``key``; None for that of a feature whose row is removed."""
    return KEYS[key].default if key in KEYS else None


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
