"""Values that the shell completes, besides the names of commands and options: typer calls these
functions with the beginning of a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


def one_of(*names: str) -> Callable[[str], list[str]]:
    """Return a function that offers those of ``names`` that begin with a word."""

    def complete(incomplete: str) -> list[str]:
        return _beginning(names, incomplete)

    return complete


def preset(incomplete: str) -> list[str]:
    from hf_zero.config import PRESETS

    return _beginning(PRESETS, incomplete)


def preset_or_file(incomplete: str) -> list[str]:
    """Offer the presets; nothing for an empty word, so that the shell offers its files."""
    return preset(incomplete) if incomplete else []


def quantized(incomplete: str) -> list[str]:
    from hf_zero.config.quantization import AWARE

    return _beginning(AWARE, incomplete)


def recipe_name(incomplete: str) -> list[str]:
    from hf_zero.cli.recipes import recipes

    return _beginning((row.name for row in recipes()[1]), incomplete)


def topic(incomplete: str) -> list[str]:
    """Offer the pages of the documentation; for a word that begins none, keys, commands, errors and
    variables.
    """
    from hf_zero.cli.docs import names_in, pages

    texts = pages()
    return _beginning(texts, incomplete) or _beginning(names_in(texts), incomplete)


def _beginning(names: Iterable[str], word: str) -> list[str]:
    return [name for name in names if name.startswith(word)]
