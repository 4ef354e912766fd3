"""Dialects of other programs in which a configuration may be written, by rows of
``features.toml``; any other mapping is DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import ClassVar

from hf_zero.config.feature_rows import FEATURES, loaded
from hf_zero.config.reading import ConfigReading
from hf_zero.config.value_types import Key


class Dialect:
    """One dialect, in a module that imports ``hf_zero.config`` alone; a row names it."""

    KEYS: ClassVar[Mapping[str, Key]] = {}
    """Keys of it that configure its own program, by path."""

    @classmethod
    def matches(cls, mapping: Mapping[str, object]) -> bool:
        """Return whether ``mapping`` is in this dialect."""
        raise NotImplementedError

    @classmethod
    def read(cls, mapping: Mapping[str, object], label: str) -> ConfigReading:
        """Read ``mapping``; ``label`` names it in messages. Errors are in the ``mistakes`` of the
        reading.
        """
        raise NotImplementedError


@cache
def dialects() -> tuple[type[Dialect], ...]:
    """Return the dialects of all rows."""
    return tuple(loaded(name) for row in FEATURES.values() for name in row.dialects)


@cache
def keys_of_dialects() -> Mapping[str, Key]:
    """Return the keys that configure programs of dialects, by path."""
    return {path: key for each in dialects() for path, key in each.KEYS.items()}


def read_any(mapping: Mapping[str, object], label: str, foreign: bool = False) -> ConfigReading:
    """Read ``mapping`` in the dialect that it is written in; ``foreign`` as of ConfigReading."""
    for dialect in dialects():
        if dialect.matches(mapping):
            return dialect.read(mapping, label)
    return ConfigReading(foreign=foreign).read(mapping, label)
