"""Output of the commands: a table, or the same as JSON."""

from __future__ import annotations

import codecs
import io
import json
import os
import shutil
import sys
import unicodedata
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from textwrap import TextWrapper
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.table import Column, Table

from hf_zero.logging import finite, in_units

__all__ = [
    "AsJson",
    "PrintableTable",
    "entry",
    "in_units",
    "print_json",
    "print_table",
    "printable",
    "replace_unencodable",
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

# ASCII for characters of the pages that do not decompose into it.
ASCII = {
    "–": "-", "—": "-", "−": "-", "·": "-", "×": "x", "≤": "<=", "≥": ">=", "→": "->", "“": '"',
    "”": '"', "’": "'", "«": '"', "»": '"', "●": "*", "◐": "+", "○": "-", "•": "-", "─": "-",
    "│": "|", **dict.fromkeys("┌┐└┘┬┴├┤┼", "+"), **dict(zip("░▒▓█", ".:%#")),
}  # fmt: skip


def replace_unencodable() -> None:
    """Let stdout and stderr print ASCII for characters that their encoding lacks, as under
    ``LC_ALL=C`` with ``PYTHONIOENCODING=ascii``; by default Python raises UnicodeEncodeError.
    """
    codecs.register_error("hf_zero_ascii", _as_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="hf_zero_ascii")


def _as_ascii(error: UnicodeError) -> tuple[str, int]:
    """Return ASCII for the characters that ``error`` names, and where encoding continues: the
    handler that codecs.register_error asks for.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    parts = []
    for character in error.object[error.start : error.end]:
        plain = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
        parts.append(ASCII.get(character) or plain or "?")
    return "".join(parts), error.end


def printable(text: str) -> str:
    """Return ``text`` with characters that are not printable as their escapes: names in files may
    hold any, also those that control a terminal.
    """
    return "".join(
        char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text
    )


class PrintableTable(Table):
    """A table whose cells, heads, footers, title and caption cannot control the terminal."""

    def __init__(self, *heads: Column | str, title: str = "", caption: str = "", **options: Any):
        heads = tuple(printable(head) if isinstance(head, str) else head for head in heads)
        title, caption = printable(title), printable(caption)
        super().__init__(*heads, title=title or None, caption=caption or None, **options)

    def add_column(self, header: str = "", footer: str = "", **options: Any) -> None:  # type: ignore[override]
        super().add_column(printable(header), printable(footer), **options)

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        shown = (printable(cell) if isinstance(cell, str) else cell for cell in cells)
        super().add_row(*shown, **options)


def print_json(value: object) -> None:
    """Print one JSON document on stdout. Values and keys of types unknown to JSON become strings,
    numbers that are not finite null.
    """
    print(json.dumps(_json_of(value), indent=2, default=str, allow_nan=False))


def _json_of(value: object) -> object:
    if isinstance(value, Mapping):
        known = (str, int, float, bool, type(None))
        return {
            key if isinstance(key, known) else str(key): _json_of(entry)
            for key, entry in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_json_of(entry) for entry in value]
    return finite(value)


def entry(head: str, *notes: str, label: str = "", indent: int = 4) -> str:
    """Return ``head`` with ``notes`` below it, as lines of the terminal's width, or of 200 columns
    in a pipe. No word is broken. ``label`` stands before the head, in the ``indent`` columns of the
    notes.
    """
    wrap = TextWrapper(
        max(40, shutil.get_terminal_size((200, 24)).columns),
        initial_indent=f"{label:{indent}}" if label else "",
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    lines = wrap.wrap(printable(head))
    wrap.initial_indent = " " * indent
    return "\n".join([*lines, *(line for note in notes for line in wrap.wrap(printable(note)))])


def print_table(table: PrintableTable) -> None:
    """Print ``table`` as wide as the terminal; in a pipe as the variable COLUMNS says, else of 200
    columns. No cell is cut. The title and caption are lines above and below it, which a narrow
    table does not fold.
    """
    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    # Rich ignores COLUMNS on a dumb terminal, and after `Dataset.map(num_proc=)`, which replaces
    # os.environ. Both sizes are given, because Rich takes a width alone for neither.
    size = shutil.get_terminal_size() if has_width else os.terminal_size((200, 24))
    # Markup is off: paths and values may contain brackets.
    console = Console(
        width=size.columns, height=size.lines, markup=False, emoji=False, highlight=False
    )
    grid = copy(table)
    grid.title = grid.caption = None
    grid.columns = [replace(column, overflow="fold") for column in table.columns]
    if table.title:
        console.print(printable(str(table.title)), style="table.title", soft_wrap=not has_width)
    console.print(grid)
    if table.caption:
        console.print(printable(str(table.caption)), style="table.caption", soft_wrap=not has_width)
