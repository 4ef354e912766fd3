"""Representations of a configuration: a mapping of the dialect, and rows with sources."""

from __future__ import annotations

import copy
from typing import Literal, NamedTuple

from hf_zero.config.dialects import keys_of_dialects
from hf_zero.config.feature_rows import SECRETS
from hf_zero.config.keys import KEYS
from hf_zero.config.reading import AUTO, ConfigReading
from hf_zero.config.refusals import Check, idle_params, refusals
from hf_zero.config.sourced import SourcedDict, flattened
from hf_zero.config.value_types import Status
from hf_zero.logging import JsonObject, aligned

Unset = Literal["omit", "default"]
REFUSED = "a run refuses it: "  # beginning of a note
NO_EFFECT = "no effect: "


class ExplainRow(NamedTuple):
    """One line of ``ZeroConfig.explain()``: a key, its value, the value's source, its effect."""

    key: str
    value: object
    source: str
    note: str


def as_dialect(reading: ConfigReading, unset: Unset) -> SourcedDict:
    """Return the values of ``reading`` as a nested mapping in DeepSpeed's dialect that keeps the
    source of each value. ``unset`` "default" adds the defaults of active keys.
    """
    flat = {
        path: value for path, value in reading.values.items() if path in KEYS and value is not None
    }
    if unset == "default":
        for path, key in KEYS.items():
            if (
                key.field
                and key.status is Status.ACTIVE
                and key.default is not None
                and not key.idle(reading.values)
            ):
                flat.setdefault(path, key.default)
    flat.setdefault("zero_optimization.stage", KEYS["zero_optimization.stage"].default)
    flat.update(dict.fromkeys(reading.autos, AUTO))

    order = {path: position for position, path in enumerate(KEYS)}
    nested: JsonObject = {}
    for path in sorted(flat, key=lambda path: order.get(path, len(order))):
        *sections, name = path.split(".")
        section_dict = nested
        for section in sections:
            section_dict = section_dict.setdefault(section, {})
        value = flat[path]
        section_dict[name] = list(value) if isinstance(value, tuple) else copy.deepcopy(value)
    remembered = {
        path: (value, reading.sources[path])
        for path, value in flattened(nested)
        if path in reading.sources
    }
    return SourcedDict(nested).remember(remembered)


def sources(reading: ConfigReading) -> dict[str, str]:
    """Return the source of each active key's value ("default" if unset) and of each other written
    key.
    """
    return {
        path: reading.sources.get(path, "default") for path, key in KEYS.items() if _acts(path)
    } | reading.sources


def explain(reading: ConfigReading, check: Check = refusals) -> list[ExplainRow]:
    """Return a row for each active key and for each other key that was written. ``check`` returns,
    by key, why ``initialize`` refuses values.
    """
    rows = []
    values = reading.given()
    refused = check(values)
    value: object
    for path, key in {**KEYS, **keys_of_dialects(), **KEYS}.items():  # equal names mean the former
        if path in reading.autos:
            value, note = AUTO, "to be filled in by Accelerate or the Trainer"
        elif path in reading.values or (_acts(path) and not key.idle(reading.values)):
            value, note = values.get(path, key.default), key.note
            if path in refused:
                note = f"{REFUSED}{refused[path]}"
            elif idle := _idle_params(path, values) or key.why_idle(values, reading.autos):
                note = f"{NO_EFFECT}{idle}"
            elif key.status is Status.INERT:
                note = f"{NO_EFFECT}{note}"
            elif key.status is Status.NOT_BUILT:
                note = key.off_note
        else:
            continue
        if path in SECRETS and value is not None:
            value = "***"
        rows.append(ExplainRow(path, value, reading.sources.get(path, "default"), note))
    row_keys = {row.key for row in rows}
    rows += [
        ExplainRow(
            path, AUTO, reading.sources[path], "to be filled in by Accelerate or the Trainer"
        )
        for path in sorted(reading.autos - row_keys)
    ]
    return rows


def _idle_params(path: str, values: JsonObject) -> str:
    """Return the parameters of the optimizer that have no effect, with the reasons, if
    ``path`` is theirs.
    """
    if path != "optimizer.params":
        return ""
    idle = idle_params(values.get("optimizer.type"), values.get(path) or {})
    return "; ".join(f"{name}: {why}" for name, why in idle.items())


def as_text(rows: list[ExplainRow]) -> str:
    """Return aligned lines: key, value, source, and the note if there is one."""
    return "\n".join(
        aligned((row.key, shown_value(row.value), row.source, row.note) for row in rows)
    )


def _acts(path: str) -> bool:
    return path in KEYS and KEYS[path].status is Status.ACTIVE and bool(KEYS[path].field)


def shown_value(value: object) -> str:
    """Return ``value`` in words."""
    if value is None or value == ():
        return "-"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value)
