"""Damage to bytes and to the values of a document, drawn from a generator of random numbers."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from typing import Any

VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 2**31, 2**62, 2**63, 2**70, 10**400, -(2**70), 1.5, math.nan, math.inf),
    *("", "a", "..", "../x", "/abs", "a/b", "a\0b", "\ud800", "x" * 5000, "float32", "int8"),
    *("</script>", "<!--<script>", "auto", "1e400", "9" * 5000),
    *([], [[]], {}, {"a": 1}, [-1], [2**40, 2**40], [0, 10**30], ["a"]),
]
PIECES = [
    b"\0", b"\xff", b"\n", b"{", b"[", b'"', b"}", b"]", b":", b"-", b"../", b"nan", b"1e999",
    b"<!--", b"</script>", b"&a [*a]", b"*a", b"!!python/name:os.system ", b"9" * 5000, b"[" * 3000,
    b"{a: " * 3000, b"slots=99999999999999", b"\xef\xbb\xbf", b"\xe2\x80\xa8",
]  # fmt: skip


def places(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in ``document``, itself included."""
    yield at
    if isinstance(document, (dict, list)):
        items = document.items() if isinstance(document, dict) else enumerate(document)
        for key, value in items:
            yield from places(value, (*at, key))


def replaced(document: Any, at: tuple[Any, ...], value: Any) -> Any:
    """Return ``document`` with ``value`` at the path ``at``; shares what is not on the path."""
    if not at:
        return value
    copy = dict(document) if isinstance(document, dict) else list(document)
    copy[at[0]] = replaced(copy[at[0]], at[1:], value)
    return copy


def damaged_document(draw: random.Random, document: Any) -> Any:
    """Return ``document`` with one to three values changed, removed, added or nested."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        *path, key = draw.choice([at for at in places(document) if at] or [("a",)])
        if not isinstance(document, (dict, list)) or not document:
            return draw.choice(VALUES)
        parent = document
        for part in path:
            parent = parent[part]
        action = draw.randrange(6)
        if action == 0:
            changed = dict(parent) if isinstance(parent, dict) else list(parent)
            del changed[key]
        elif action == 1 and isinstance(parent, dict):
            changed = {**parent, draw.choice(["a", "", "\ud800", "x.y", *parent]): parent[key]}
        elif action == 2:
            changed = replaced(parent, (key,), nested(draw, parent[key]))
        else:
            changed = replaced(parent, (key,), draw.choice(VALUES))
        document = replaced(document, tuple(path), changed)
    return document


def nested(draw: random.Random, value: Any) -> Any:
    for _ in range(draw.choice((1, 2, 50, 200))):
        value = draw.choice(([value], {"a": value}))
    return value


def damaged_bytes(draw: random.Random, content: bytes) -> bytes:
    """Return ``content`` with some bits flipped, a part removed, doubled or cut off, a piece
    inserted, or another number.
    """
    found = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(len(found) + 1)
        end = min(len(found), at + draw.choice((1, 2, 8, 100)))
        action = draw.randrange(7)
        if action == 6 and (numbers := [*re.finditer(rb"\d+", bytes(found[:100_000]))]):
            number = draw.choice(numbers)
            found[slice(*number.span())] = draw.choice((b"-1", b"9" * 14, b"9" * 5000))
        elif action == 0 and found:
            found[at % len(found)] ^= 1 << draw.randrange(8)
        elif action == 1:
            del found[at:end]
        elif action == 2:
            found[at:at] = found[at:end]
        elif action == 3:
            found[at:end] = draw.randbytes(end - at)
        elif action == 4:
            found[at:at] = draw.choice(PIECES)
        elif draw.randrange(4) == 0:
            del found[at:]
    return bytes(found)
