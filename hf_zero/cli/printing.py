"""Output of the commands: a table, or the same as JSON."""

from __future__ import annotations

import codecs
import io
import json
import os
import shutil
import sys
import unicodedata
from textwrap import TextWrapper
from typing import Annotated, Any

import typer
from rich import table
from rich.console import Console, RenderableType

from hf_zero.logging import in_units

__all__ = [
    "AsJson", "PrintableTable", "entry", "in_units", "print_json", "print_table",
    "replace_unencodable",
]  # fmt: skip

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
    """Return ``text`` with characters that control a terminal as their escapes: names in files may
    hold any.
    """
    return "".join(
        char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text
    )


class PrintableTable(table.Table):
    """A table whose cells, title and caption cannot control the terminal."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        shown = (printable(cell) if isinstance(cell, str) else cell for cell in cells)
        super().add_row(*shown, **options)


def print_json(value: object) -> None:
    """Print one JSON document on stdout. Values of types unknown to JSON become strings."""
    print(json.dumps(value, indent=2, default=str))


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
    title, caption, table.title, table.caption = table.title, table.caption, None, None
    for column in table.columns:
        column.overflow = "fold"
    if title:
        console.print(printable(str(title)), style="table.title", soft_wrap=not has_width)
    console.print(table)
    if caption:
        console.print(printable(str(caption)), style="table.caption", soft_wrap=not has_width)
