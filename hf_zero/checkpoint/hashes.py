"""Hashes of files, with the names of their algorithms: xxh3 of 128 bits, which keeps up with any
disk; SHA-256 in what version 1 wrote.

A hash tells damage, not malice: who can change a file can change the manifest too. XXH3:
https://github.com/Cyan4973/xxHash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import xxhash

DEFAULT = "xxh3_128"
ALGORITHMS: dict[str, Callable[[], Any]] = {DEFAULT: xxhash.xxh3_128, "sha256": hashlib.sha256}
_DIGITS = {name: 2 * make().digest_size for name, make in ALGORITHMS.items()}


class Hash:
    """The hash of bytes as they come, as ``<algorithm>:<hexadecimal digits>``."""

    def __init__(self, algorithm: str = DEFAULT) -> None:
        self._algorithm, self._state = algorithm, ALGORITHMS[algorithm]()

    def update(self, data: Any) -> None:
        self._state.update(data)

    def text(self) -> str:
        return f"{self._algorithm}:{self._state.hexdigest()}"


def hash_of(content: bytes | memoryview) -> str:
    made = Hash()
    made.update(content)
    return made.text()


def algorithm_of(text: str) -> str:
    """The algorithm that made ``text``.

    Raises ValueError if it is no hash that can be computed here.
    """
    name, colon, digits = text.partition(":")
    if not colon or len(digits) != _DIGITS.get(name) or set(digits) - set("0123456789abcdef"):
        raise ValueError(
            f"{text!r} is no hash; expected {' or '.join(ALGORITHMS)}, a colon "
            "and hexadecimal digits"
        )
    return name
