"""Parts of documents that scripts write, between marks."""

from __future__ import annotations

import re
from collections.abc import Sequence


def markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with the columns ``head``; a line may lack its last cells."""
    rows = [[*line, *[""] * (len(head) - len(line))] for line in lines]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def filled(text: str, name: str, part: str) -> str:
    """Return ``text`` with ``part`` between the marks of ``name``."""
    marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    if not marks.search(text):
        raise SystemExit(f"the marks <!-- {name} --> … <!-- end of {name} --> are missing")
    return marks.sub(lambda found: found[1] + part + "\n" + found[2], text)
