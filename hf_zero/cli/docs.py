"""``hf-zero docs``: the pages of hf_zero/docs in the terminal, whole, by section or by key."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown

import hf_zero
from hf_zero.cli.completions import beginning
from hf_zero.cli.doc_search import descriptions, find, names_in, pages
from hf_zero.cli.printing import AsJson, PrintableTable, print_json, print_table

WIDEST = 100  # columns of a page
# a directive of mkdocstrings with its options
DOCSTRING = re.compile(r"^::: (\S+)$(?:\n    .+)*", re.M)
PICTURE = re.compile(r"^<picture>.*?^</picture>\n", re.M | re.S)
COMMENT = re.compile(r"^<!-- .* -->\n", re.M)
# parts of a docstring: a section, an item of it, code with or without a role of Sphinx
PART = re.compile(r"(Args|Returns|Raises|Yields|Attributes):")
ITEM = re.compile(r"    (\*{0,2}[\w.]+(?:, \w+)*): (.*)")
ROLE = re.compile(r"(?::\w+:`~?|``)([^`]+)``?")


def _offered(incomplete: str) -> list[str]:
    """Offer the pages; for a word that begins none, keys, commands, errors and variables."""
    texts = pages()
    return beginning(texts, incomplete) or beginning(names_in(texts), incomplete)


def docs(
    topic: Annotated[
        str | None,
        typer.Argument(
            help="A page, a heading, or the name of an error, variable, key or command.",
            autocompletion=_offered,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the pages of the documentation, or show one, a section of it, or what the reference says
    of a key.

    Example: hf-zero docs zero_optimization.stage
    """
    if topic is None:
        if as_json:
            print_json(descriptions())
            return
        table = PrintableTable("topic", "content", title=f"hf-zero {hf_zero.__version__}")
        for row in descriptions().items():
            table.add_row(*row)
        print_table(table)
        print(
            "hf-zero docs TOPIC shows a page, or the section of a heading, a key, a command or an "
            "error"
        )
        return
    text = find(topic)
    if as_json:
        print_json({"topic": topic, "markdown": text})
    else:
        show(text)


def show(text: str) -> None:
    """Print Markdown on stdout, with docstrings in place of the directives for them."""
    text = COMMENT.sub("", PICTURE.sub("", DOCSTRING.sub(_docstring, text)))
    console = Console(emoji=False)
    if sys.stdout.isatty():
        console.width = min(console.width, WIDEST)
    console.print(Markdown(text, hyperlinks=False))


def _docstring(directive: re.Match[str]) -> str:
    """Return the signature and the docstring of what ``directive`` names, as Markdown that wraps:
    an item for each argument and error.
    """
    module, _, name = directive[1].rpartition(".")
    value = getattr(importlib.import_module(module), name)
    signature = inspect.signature(value)
    parameters = "".join(
        f"    {_parameter(parameter)},\n" for parameter in signature.parameters.values()
    )
    returned = signature.return_annotation
    ends = "" if returned is signature.empty else f" -> {_annotation(returned)}"
    shown = [f"```python\n{name}(\n{parameters}){ends}\n```\n"]
    section = False
    for line in (inspect.getdoc(value) or "").splitlines():
        text = ROLE.sub(r"`\1`", line.strip())
        if PART.fullmatch(text):
            section = True
            text = f"\n**{text[:-1]}**\n"
        elif section and (item := ITEM.fullmatch(ROLE.sub(r"`\1`", line))):
            text = f"- `{item[1]}`: {item[2]}"
        elif line and not line.startswith(" "):
            section = False
        elif section:
            text = f"  {text}"
        elif text:
            text = f"    {text}"  # an example
        shown.append(text)
    return "\n".join(shown)


def _parameter(parameter: inspect.Parameter) -> str:
    """Return a parameter as it is written in a file, its annotation without quotes."""
    text = str(parameter.replace(annotation=parameter.empty, default=parameter.empty))
    if parameter.annotation is not parameter.empty:
        text += f": {_annotation(parameter.annotation)}"
    return text if parameter.default is parameter.empty else f"{text} = {parameter.default!r}"


def _annotation(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
