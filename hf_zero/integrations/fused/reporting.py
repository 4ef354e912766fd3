"""The table of modules that were replaced, and of those that were not, with the reason."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """A module, or all that differ in the numbers of layers alone ("*"): the kernels it got, or why
    it got none.
    """

    kernels: tuple[str, ...]
    what: str
    where: str
    why_not: str = ""
    count: int = 1


@dataclass(frozen=True)
class Report:
    """What :func:`hf_zero.optimize` did: a line for each module it looked at.

    Printed, it is a table with like modules in one row.
    """

    lines: tuple[Line, ...]

    @property
    def replaced(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if not line.why_not)

    @property
    def left(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.why_not)

    def rows(self) -> Iterator[Line]:
        """The lines, those that differ in the numbers of layers alone as one."""
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
