"""The parser of JSON in files and of other programs."""

from __future__ import annotations

import json
from typing import Any


class DuplicateKeyError(ValueError):
    """Two values of ``key`` in one object: parsers differ in which of them counts."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key!r:.80} occurs twice in one section")


class NestingError(ValueError, RecursionError):
    """Values too deep in each other."""


def parse_json(text: str | bytes) -> Any:
    """Return the value in ``text``.

    Raises ValueError: JSONDecodeError, UnicodeDecodeError, DuplicateKeyError or NestingError.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise NestingError("values are too deep in each other") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise DuplicateKeyError(next(key for key in keys if keys.count(key) > 1))
    return values
