"""Values that the shell completes, besides the names of commands and options: typer calls these
functions with the beginning of a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


def one_of(*names: str) -> Callable[[str], list[str]]:
    """Return a function that offers those of ``names`` that begin with a word."""

    def complete(incomplete: str) -> list[str]:
        return beginning(names, incomplete)

    return complete


def preset(incomplete: str) -> list[str]:
    from hf_zero.config import PRESETS

    return beginning(PRESETS, incomplete)


def preset_or_file(incomplete: str) -> list[str]:
    """Offer the presets; nothing for an empty word, so that the shell offers its files."""
    return preset(incomplete) if incomplete else []


def quantized(incomplete: str) -> list[str]:
    from hf_zero.config.techniques import AWARE

    return beginning(AWARE, incomplete)


def beginning(names: Iterable[str], word: str) -> list[str]:
    """Return those of ``names`` that begin with ``word``."""
    return [name for name in names if name.startswith(word)]
