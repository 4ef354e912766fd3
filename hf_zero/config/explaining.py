"""Representations of a configuration: a mapping of the dialect, rows with sources, and text for
rank 0's log.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from hf_zero.config.accelerate_yaml import ACCELERATE_KEYS
from hf_zero.config.keys import KEYS
from hf_zero.config.provenance import SourcedDict, flattened, is_written
from hf_zero.config.reading import AUTO, ConfigReading
from hf_zero.config.refusals import Check, idle_params, refusals
from hf_zero.config.rows import Status
from hf_zero.config.sections import SECRETS

Unset = Literal["omit", "default"]
REFUSED = "initialize refuses it: "  # beginning of a note


class ExplainRow(NamedTuple):
    """One line of ``ZeroConfig.explain()``: a key, its value, the source of the value, and its
    effect.
    """

    key: str
    value: Any
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
    nested: dict[str, Any] = {}
    for path in sorted(flat, key=lambda path: order.get(path, len(order))):
        *sections, name = path.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        value = flat[path]
        place[name] = list(value) if isinstance(value, tuple) else copy.deepcopy(value)
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
    given = {
        path: value | _autos_in(path, reading) if isinstance(value, dict) else value
        for path, value in reading.values.items()
    }
    refused = check(given)
    value: Any
    for path, key in {**KEYS, **ACCELERATE_KEYS, **KEYS}.items():  # equal names mean the former
        if path in reading.autos:
            value, note = AUTO, "to be filled in by Accelerate or the Trainer"
        elif path in reading.values or (_acts(path) and not key.idle(reading.values)):
            value, note = given.get(path, key.default), key.note
            if path in refused:
                note = f"{REFUSED}{refused[path]}"
            elif idle := _idle_params(path, given) or key.why_idle(given, reading.autos):
                note = f"no effect: {idle}"
            elif key.status is Status.INERT:
                note = f"no effect: {note}"
            elif key.status is Status.NOT_BUILT:
                note = key.off_note
        else:
            continue
        if path in SECRETS and value is not None:
            value = "***"
        rows.append(ExplainRow(path, value, reading.sources.get(path, "default"), note))
    known = {row.key for row in rows}
    rows += [
        ExplainRow(
            path, AUTO, reading.sources[path], "to be filled in by Accelerate or the Trainer"
        )
        for path in sorted(reading.autos - known)
    ]
    return rows


def _autos_in(section: str, reading: ConfigReading) -> dict[str, str]:
    """Return the members of ``section`` that are still "auto", in the order of the file."""
    return {
        path.removeprefix(f"{section}."): AUTO
        for path in reading.sources
        if path in reading.autos and path.startswith(f"{section}.")
    }


def _idle_params(path: str, values: Mapping[str, Any]) -> str:
    """Return the parameters of a one-bit optimizer that have no effect, with the reasons, if
    ``path`` is theirs.
    """
    if path != "optimizer.params":
        return ""
    idle = idle_params(values.get("optimizer.type"), values.get(path) or {})
    return "; ".join(f"{name}: {why}" for name, why in idle.items())


def written(rows: list[ExplainRow], *asked: str) -> list[ExplainRow]:
    """Return the rows whose values were written, and those of the keys ``asked``."""
    return [row for row in rows if is_written(row.source) or row.key in asked]


def as_text(rows: list[ExplainRow]) -> str:
    """Return aligned lines: key, value, source, and the note if there is one."""
    cells = [(row.key, _show(row.value), row.source, row.note) for row in rows]
    widths = [max((len(cell[column]) for cell in cells), default=0) for column in range(3)]
    lines = [
        "  ".join([*(text.ljust(width) for text, width in zip(cell, widths)), cell[3]]).rstrip()
        for cell in cells
    ]
    return "\n".join(lines)


def _acts(path: str) -> bool:
    return path in KEYS and KEYS[path].status is Status.ACTIVE and bool(KEYS[path].field)


def _show(value: Any) -> str:
    if value is None or value == ():
        return "-"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value)
