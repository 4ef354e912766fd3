"""Reversible changes to modules of a model, and the table that reports them."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Replacement:
    """A change made by the kernel ``what`` ("linear_cross_entropy") in the module ``where``, named
    as by ``named_modules`` ("lm_head"; "" is the model).

    ``undo`` restores the module and is idempotent. Parameters and their names do not change.
    """

    what: str
    where: str
    undo: Callable[[], None]


@dataclass(frozen=True)
class Line:
    """A module, or modules that differ only in layer numbers ("*"), with its kernels or the reason
    why it has none.
    """

    kernels: tuple[str, ...]
    what: str
    where: str
    why_not: str = ""
    count: int = 1


@dataclass(frozen=True)
class Report:
    """Report of :func:`hf_zero.optimize`: one line for each module it considered.

    Printed, it is a table with similar modules in one row.
    """

    lines: tuple[Line, ...]

    @property
    def replaced(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if not line.why_not)

    @property
    def left(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.why_not)

    def rows(self) -> Iterator[Line]:
        """Yield the lines, merging those that differ only in layer numbers."""
        counts: dict[tuple[tuple[str, ...], str, str, str], int] = {}
        for line in self.lines:
            where = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", line.where)
            key = (line.kernels, line.what, where, line.why_not)
            counts[key] = counts.get(key, 0) + line.count
        for (kernels, what, where, why_not), count in counts.items():
            yield Line(kernels, what, where, why_not, count)

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table("kernels", "module", "where", "", box=None, pad_edge=False)
        for row in sorted(self.rows(), key=lambda row: bool(row.why_not)):
            table.add_row(
                ", ".join(row.kernels),
                row.what,
                row.where or "the model",
                f"left: {row.why_not}" if row.why_not else f"{row.count} ×",
            )
        text = io.StringIO()
        Console(file=text, width=200, markup=False, emoji=False, highlight=False).print(table)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
