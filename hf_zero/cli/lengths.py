"""The table of ``hf-zero estimate --seq``: activations by sequence length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from hf_zero.cli.printing import in_units

if TYPE_CHECKING:
    from hf_zero.planning.activation_memory import LengthEstimate


def lengths_table(rows: Sequence[LengthEstimate], ranks: int) -> Table:
    """Return a table with one row per length and one column per way, from the fastest to the
    smallest. ``ranks`` share a sequence.
    """
    shared = f", each shared by {ranks} ranks" if ranks > 1 else ""
    table = Table(
        title=f"activations of {rows[0].rows} sequence{'s' if rows[0].rows > 1 else ''}{shared}",
        caption="Per rank, at most at once, beside the tables above; in brackets what waits for "
        "the backward. With the kernels of torch.",
    )
    table.add_column("length", justify="right")
    table.add_column("tokens of a rank", justify="right")
    for way in rows[0].ways:
        table.add_column(way.name or "as configured", justify="right")
    for row in rows:
        sizes = (f"{in_units(way.most)} ({in_units(way.kept)})" for way in row.ways)
        table.add_row(f"{row.length:,}", f"{row.tokens:,}", *sizes)
    return table
