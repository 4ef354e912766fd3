"""``hf-zero docs``: the pages of hf_zero/docs in the terminal, whole or by section."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from hf_zero.cli.printing import AsJson, print_json, print_table
from hf_zero.config.spelling import did_you_mean
from hf_zero.errors import ConfigError

FOLDER = Path(__file__).resolve().parents[1] / "docs"
WIDEST = 100  # columns of a page
FENCE = re.compile(r"^(```.*?^```)$", re.M | re.S)
HEADING = re.compile(r"^(#+) (.+)$", re.M)
DOCSTRING = re.compile(r"^::: (\S+)$", re.M)  # a directive of mkdocstrings
PICTURE = re.compile(r"^<picture>.*?^</picture>\n", re.M | re.S)
COMMENT = re.compile(r"^<!-- .* -->\n", re.M)


class Section(NamedTuple):
    """A heading and the text below it, up to the next heading of its level."""

    page: str
    title: str
    level: int
    text: str

    @property
    def anchor(self) -> str:
        return anchor_of(self.title)


def anchor_of(title: str) -> str:
    """Return the anchor of a heading, as the site makes it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def pages() -> dict[str, str]:
    """Return the text of each page by name, in the order of index.md."""
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    names = ["index", *dict.fromkeys(re.findall(r"\]\(([a-z-]+)\.md", index))]
    return {name: (FOLDER / f"{name}.md").read_text(encoding="utf-8") for name in names}


def sections(page: str, text: str) -> Iterator[Section]:
    """Yield each section of a page; the first is the page itself."""
    blank = FENCE.sub(
        lambda block: re.sub(r"[^\n]", " ", block[0]), text
    )  # a comment is no heading
    found = list(HEADING.finditer(blank))
    for place, heading in enumerate(found):
        level = len(heading[1])
        after = (other.start() for other in found[place + 1 :] if len(other[1]) <= level)
        yield Section(page, heading[2], level, text[heading.start() : next(after, len(text))])


def docs(
    topic: Annotated[
        str | None,
        typer.Argument(
            help="A page, a heading, or the name of an error, variable, key or command."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the pages of the documentation, or show one, or a section of it.

    Example: hf-zero docs offload
    """
    if topic is None:
        titles = {
            name: text.partition("\n")[0].removeprefix("# ") for name, text in pages().items()
        }
        if as_json:
            print_json(titles)
            return
        table = Table("topic", "page")
        for row in titles.items():
            table.add_row(*row)
        print_table(table)
        print("show one with hf-zero docs TOPIC; a heading, an error or a key is a topic, too")
        return
    text = find(topic)
    if as_json:
        print_json({"topic": topic, "markdown": text})
    else:
        show(text)


def find(topic: str) -> str:
    """Return the Markdown of the page or section that ``topic`` names. Raises ConfigError."""
    texts = pages()
    page, _, anchor = topic.removesuffix(".md").replace(".md#", "#").partition("#")
    if page in texts and not anchor:
        return texts[page]
    wanted = anchor_of(anchor or topic)
    held = [each for name, text in texts.items() for each in sections(name, text)]
    found = [each for each in held if each.anchor == wanted and (not anchor or each.page == page)]
    for key in (topic, *_sections_of(topic)):  # a key is in the section of the reference
        found = found or [each for each in held if each.page == "keys" and each.title == f"`{key}`"]
    if not found:
        names = (*(each.title.strip("`") for each in held), *texts)
        known = {anchor_of(name): name for name in names}  # Offload and offload are one topic
        said = _mean(topic, [*known.values()])
        raise ConfigError(f"no page or heading {topic!r} in the documentation{said}")
    best = min(found, key=lambda each: (each.page != "keys", each.level))
    return best.text


def _sections_of(key: str) -> Iterator[str]:
    """Yield the sections that hold a dotted key, the innermost first."""
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


def _mean(topic: str, known: list[str]) -> str:
    said = did_you_mean(topic, known)
    return said if "did you mean" in said else "; hf-zero docs without a topic lists the pages"


def show(text: str) -> None:
    """Print Markdown on stdout, with docstrings in place of the directives for them."""
    text = COMMENT.sub("", PICTURE.sub("", DOCSTRING.sub(_docstring, text)))
    console = Console(emoji=False)
    if sys.stdout.isatty():
        console.width = min(console.width, WIDEST)
    console.print(Markdown(text, hyperlinks=False))


def _docstring(directive: re.Match[str]) -> str:
    module, _, name = directive[1].rpartition(".")
    value = getattr(importlib.import_module(module), name)
    signature = inspect.signature(value)
    return f"```python\n{name}{signature}\n```\n\n```text\n{inspect.getdoc(value)}\n```"
