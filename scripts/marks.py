"""Parts of documents that scripts write, between marks."""

from __future__ import annotations

import re


def filled(text: str, name: str, part: str) -> str:
    """Return ``text`` with ``part`` between the marks of ``name``."""
    marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    if not marks.search(text):
        raise SystemExit(f"the marks <!-- {name} --> … <!-- end of {name} --> are missing")
    return marks.sub(lambda found: found[1] + part + "\n" + found[2], text)
