"""Output of the commands: a table, or the same as JSON."""

from __future__ import annotations

import json
import os
import shutil
import sys
from textwrap import TextWrapper
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hf_zero.logging import in_units

__all__ = ["AsJson", "entry", "in_units", "print_json", "print_table"]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def print_json(value: Any) -> None:
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
    lines = wrap.wrap(head)
    wrap.initial_indent = " " * indent
    return "\n".join([*lines, *(line for note in notes for line in wrap.wrap(note))])


def print_table(table: Table) -> None:
    """Print ``table`` as wide as the terminal; in a pipe as the variable COLUMNS says, else of 200
    columns. No cell is cut. The title and caption are lines above and below it, which a narrow
    table does not fold.
    """
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    # Rich ignores COLUMNS on a dumb terminal, and after `Dataset.map(num_proc=)`, which replaces
    # os.environ. Both sizes are given, because Rich takes a width alone for neither.
    size = shutil.get_terminal_size() if known else os.terminal_size((200, 24))
    # Markup is off: paths and values may contain brackets.
    console = Console(
        width=size.columns, height=size.lines, markup=False, emoji=False, highlight=False
    )
    title, caption, table.title, table.caption = table.title, table.caption, None, None
    for column in table.columns:
        column.overflow = "fold"
    if title:
        console.print(title, style="table.title", soft_wrap=not known)
    console.print(table)
    if caption:
        console.print(caption, style="table.caption", soft_wrap=not known)
