"""The rows of a configuration in a few lines, for rank 0's log."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping

from hf_zero.config.explaining import NO_EFFECT, ExplainRow, shown_value
from hf_zero.config.sourced import DICT, FILES, is_written

COMPUTED = "computed"
UNBROKEN = "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}"
WIDTH = 100


def written(rows: list[ExplainRow], *keys: str) -> list[ExplainRow]:
    """Return the rows whose values were written, and those of ``keys``."""
    return [row for row in rows if is_written(row.source) or row.key in keys]


def as_summary(rows: list[ExplainRow]) -> list[str]:
    """Return ``rows`` as lines of at most :data:`WIDTH` characters, unless a word is longer, for
    rank 0's log: values by source, the sections that are off, and keys without effect by reason.
    """
    disabled = [name for row in rows if (name := _disabled_section(row))]
    values: dict[str, list[str]] = {}  # by source
    idle: dict[str, list[str]] = {}  # keys without effect, by reason
    for row in rows:
        if _is_within(f"{row.key}.", disabled):
            continue
        if row.note.startswith(NO_EFFECT):
            idle.setdefault(row.note.removeprefix(NO_EFFECT), []).append(row.key)
        else:
            source, value = _source_and_value(row)
            values.setdefault(source, []).append(f"{row.key} = {value}")
    lines = [line for source, texts in values.items() for line in _filled(f"{source}: ", texts)]
    if disabled:
        outermost = [name for name in disabled if not _is_within(name, disabled)]
        lines += _filled("off: ", outermost)
    if idle:
        lines.append("without effect in hf-zero:")
    for why, keys in idle.items():
        lines += _filled("  ", [*keys[:-1], f"{keys[-1]}: {why}"])
    return lines


def _source_and_value(row: ExplainRow) -> tuple[str, str]:
    """Return the source that values are listed under, and the value as listed there: with the name
    of its key in that source, if it has another there, or with the formula of a computed one.
    """
    value, (source, _, name) = shown_value(row.value), row.source.rpartition(": ")
    if name == row.key:
        return source, value
    if row.source.startswith(f"{COMPUTED}: "):
        return COMPUTED, f"{value} ({row.source.removeprefix(f'{COMPUTED}: ')})"
    if row.source.startswith((*FILES, DICT)):
        return source, f"{value} ({name})"
    return row.source, value


def _is_within(section: str, others: Iterable[str]) -> bool:
    return any(section.startswith(f"{other}.") for other in others)


def _disabled_section(row: ExplainRow) -> str:
    """Return the section that ``row`` disables, or ""."""
    if row.value is False and row.key.endswith(".enabled"):
        return row.key.removesuffix(".enabled")
    disables = isinstance(row.value, Mapping) and row.value.get("enabled") is False
    return row.key if disables else ""


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
