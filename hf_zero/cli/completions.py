"""Values of options and arguments that the shell completes."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def one_of(*names: str) -> Callable[[str], list[str]]:
    """Return a function that offers those of ``names`` that begin with a word."""

    def complete(incomplete: str) -> list[str]:
        return beginning(names, incomplete)

    return complete


def complete_preset(incomplete: str) -> list[str]:
    """Offer the presets of the configuration."""
    from hf_zero.config import PRESETS

    return beginning(PRESETS, incomplete)


def complete_preset_or_file(incomplete: str) -> list[str]:
    """Offer the presets; nothing for an empty word, so that the shell offers its files."""
    return complete_preset(incomplete) if incomplete else []


def complete_quantized(incomplete: str) -> list[str]:
    """Offer the formats of quantization-aware training."""
    from hf_zero.config.low_bits import AWARE

    return beginning(AWARE, incomplete)


def beginning(names: Iterable[str], word: str) -> list[str]:
    """Return those of ``names`` that begin with ``word``."""
    return [name for name in names if name.startswith(word)]
