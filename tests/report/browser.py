"""A headless Chromium that draws a page, and what it has drawn."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.helpers.commands import completed

NAMES = ("chromium", "chromium-browser", "google-chrome")
ALONE = ("--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking")
VOID = {"meta", "link", "br", "img", "input", "hr"}
PROGRAM = next(filter(None, map(shutil.which, NAMES)), "")
needs_chromium = pytest.mark.skipif(
    not PROGRAM, reason="no Chromium on this machine (Debian: apt-get install chromium)"
)


def draw(page: Path, home: Path, *options: str) -> tuple[str, list[str]]:
    """Return the document after the scripts of ``page`` have run for 20 seconds of their clock,
    without a network, and the lines of the console.
    """
    sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()
    ran = completed(
        [
            PROGRAM, "--headless", "--disable-gpu", *sandbox, *ALONE, f"--user-data-dir={home}",
            "--virtual-time-budget=20000", "--window-size=1280,2000", "--enable-logging=stderr",
            "--dump-dom", *options, f"file://{page}",
        ],
        timeout=180,
    )  # fmt: skip
    return ran.stdout, [line for line in ran.stderr.splitlines() if "CONSOLE" in line]


class Drawing(HTMLParser):
    """``marks``: for each chart the number of marks by class, such as mark-rect; ``attributes``:
    of the body.
    """

    def __init__(self, document: str) -> None:
        super().__init__()
        self.marks: dict[str, Counter[str]] = {}
        self.attributes: dict[str, str | None] = {}
        self._open: list[tuple[str, str, str]] = []  # tag, chart, class of the mark
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        _, chart, mark = self._open[-1] if self._open else ("", "", "")
        classes = (given.get("class") or "").split()
        if tag == "body":
            self.attributes = given
        if "chart" in classes:
            chart = given["id"] or ""
            self.marks[chart] = Counter()
        if "role-mark" in classes:
            mark = classes[0]
        elif any(name.startswith("role-") for name in classes):
            mark = ""
        if tag == "path" and mark and len(given.get("d") or "") > 4:
            self.marks[chart][mark] += 1
        if tag not in VOID:
            self._open.append((tag, chart, mark))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass
