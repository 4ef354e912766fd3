"""Representations of a configuration: a mapping of the dialect, rows with sources, and text for
rank 0's log.
"""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from hf_zero.config.dialects import keys_of_dialects
from hf_zero.config.feature_rows import SECRETS
from hf_zero.config.files import DICT, FILES, SourcedDict, flattened, is_written
from hf_zero.config.keys import KEYS
from hf_zero.config.reading import AUTO, ConfigReading
from hf_zero.config.refusals import Check, idle_params, refusals
from hf_zero.config.value_types import Status
from hf_zero.logging import JsonObject, aligned

Unset = Literal["omit", "default"]
REFUSED = "a run refuses it: "  # beginning of a note
NO_EFFECT = "no effect: "
COMPUTED = "computed"
UNBROKEN = "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}"
WIDTH = 100


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


def written(rows: list[ExplainRow], *keys: str) -> list[ExplainRow]:
    """Return the rows whose values were written, and those of ``keys``."""
    return [row for row in rows if is_written(row.source) or row.key in keys]


def as_text(rows: list[ExplainRow]) -> str:
    """Return aligned lines: key, value, source, and the note if there is one."""
    return "\n".join(aligned((row.key, _show(row.value), row.source, row.note) for row in rows))


def as_summary(rows: list[ExplainRow]) -> list[str]:
    """Return ``rows`` as lines of at most :data:`WIDTH` characters, for rank 0's log: values by
    source, the sections that are off, and keys without effect by reason.
    """
    off = [name for row in rows if (name := _section_off(row))]
    values: dict[str, list[str]] = {}
    idle: dict[str, list[str]] = {}
    for row in rows:
        if any(f"{row.key}.".startswith(f"{name}.") for name in off):
            continue
        if row.note.startswith(NO_EFFECT):
            idle.setdefault(row.note.removeprefix(NO_EFFECT), []).append(row.key)
        else:
            source, value = row.source.removesuffix(f": {row.key}"), _show(row.value)
            if source == row.source and source.startswith((*FILES, DICT)):  # under another name
                source, _, name = source.rpartition(": ")
                value = f"{value} ({name})"
            elif source.startswith(COMPUTED):
                source, value = COMPUTED, f"{value} ({source.removeprefix(f'{COMPUTED}: ')})"
            values.setdefault(source, []).append(f"{row.key} = {value}")
    lines = [line for source, texts in values.items() for line in _filled(f"{source}: ", texts)]
    if off:
        lines += _filled("off: ", off)
    if idle:
        lines.append("without effect in hf-zero:")
    for why, keys in idle.items():
        lines += _filled("  ", [*keys[:-1], f"{keys[-1]}: {why}"])
    return lines


def _section_off(row: ExplainRow) -> str:
    """Return the section that ``row`` switches off, or ""."""
    if row.value is False and row.key.endswith(".enabled"):
        return row.key.removesuffix(".enabled")
    off = isinstance(row.value, Mapping) and row.value.get("enabled") is False
    return row.key if off else ""


def _filled(start: str, parts: Iterable[str]) -> list[str]:
    """Return ``start`` and ``parts`` with commas, in as few lines as they fit in."""
    lines = textwrap.wrap(
        start + ", ".join(part.replace(" = ", UNBROKEN) for part in parts),
        WIDTH,
        subsequent_indent="  " if start.strip() else f"{start}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(UNBROKEN, " = ") for line in lines]


def _acts(path: str) -> bool:
    return path in KEYS and KEYS[path].status is Status.ACTIVE and bool(KEYS[path].field)


def _show(value: object) -> str:
    if value is None or value == ():
        return "-"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value)
