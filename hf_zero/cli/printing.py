"""Output of the commands: a table, or the same as JSON."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hf_zero.logging import in_units

__all__ = ["AsJson", "in_units", "print_json", "print_table"]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def print_json(value: Any) -> None:
    """Print one JSON document on stdout. Values of types unknown to JSON become strings."""
    print(json.dumps(value, indent=2, default=str))


def print_table(table: Table) -> None:
    # A pipe has no width, so the table is not truncated there. Markup is off: paths and values may
    # contain brackets.
    console = Console(
        width=None if sys.stdout.isatty() else 200, markup=False, emoji=False, highlight=False
    )
    console.print(table)
