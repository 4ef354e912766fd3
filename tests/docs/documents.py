"""The documents that are checked: their blocks of code, inline code, headings and links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from hf_zero.cli.doc_search import FOLDER, anchor_of

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = {path.stem: path for path in sorted(FOLDER.glob("*.md"))}
DOCUMENTS = {**PAGES, "README": README}
FENCE = re.compile(
    r'^```(?P<kind>\S*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$', re.M | re.S
)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(
    r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"|!\[[^\]]*\]\(([^)\s]+)\)"
)


class Block(NamedTuple):
    """A fenced block: the language, the file that it is, if any, and its text."""

    page: str
    line: int
    kind: str
    title: str | None
    text: str


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page. A diff is Python, as it is after the change."""
    text = DOCUMENTS[page].read_text()
    return [
        Block(
            page,
            text.count("\n", 0, found.start()) + 1,
            "python" if found["kind"] == "diff" else found["kind"],
            found["title"],
            changed(found["text"]) if found["kind"] == "diff" else found["text"],
        )
        for found in FENCE.finditer(text)
    ]


def changed(diff: str) -> str:
    """Return the text after the change that ``diff`` shows, whose marks are two columns wide."""
    return "\n".join(line[2:] for line in diff.splitlines() if not line.startswith("-"))


ALL = [block for page in DOCUMENTS for block in blocks(page)]


def of_kind(*kinds: str) -> list[Block]:
    return [block for block in ALL if block.kind in kinds]


def prose(page: str) -> str:
    """The text of a page without its code blocks; headings, lists and tables are in it."""
    return FENCE.sub("", DOCUMENTS[page].read_text())


def inline_code(page: str) -> list[str]:
    return INLINE.findall(re.sub(r"\n\s*", " ", prose(page)))


def headings(page: str) -> list[tuple[int, str]]:
    return [(len(marks), title) for marks, title in re.findall(r"^(#+) (.+)$", prose(page), re.M)]


def anchors(page: str) -> list[str]:
    return [anchor_of(title) for _, title in headings(page)]


def links(page: str) -> list[str]:
    return [next(filter(None, found)) for found in LINK.findall(prose(page))]
