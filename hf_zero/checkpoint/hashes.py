"""Hashes of files, and of the blocks of rank files.

Hashes are stored with the name of their algorithm: 128-bit xxh3, which keeps up with any disk
(https://github.com/Cyan4973/xxHash), or SHA-256 in files of format version 1. They detect damage,
not tampering: whoever can change a file can change the manifest too.

The hash of a file needs the whole file. A rank file therefore also has hashes of blocks, so that a
reader can verify any range it reads. The header and each tensor are cut into blocks separately,
from their first byte on, so that a whole tensor is a whole number of blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import xxhash

from hf_zero.checkpoint.storage import BLOCK, AnyPath, open_ranges

DEFAULT_HASH = "xxh3_128"
HASH_ALGORITHMS: dict[str, Callable[[], Any]] = {
    DEFAULT_HASH: xxhash.xxh3_128,
    "sha256": hashlib.sha256,
}
_DIGITS = {name: 2 * make().digest_size for name, make in HASH_ALGORITHMS.items()}
_HEXADECIMAL = set("0123456789abcdef")

BLOCK_HASH = "xxh3_64"
_BLOCK_DIGITS = 2 * xxhash.xxh3_64().digest_size
MIN_BLOCK = 1 << 20  # bytes
MOST_BLOCKS = 1 << 16  # most blocks of a file, roughly: larger files have larger blocks


class Hash:
    """Incremental hash, as text ``<algorithm>:<hexadecimal digits>``."""

    def __init__(self, algorithm: str = DEFAULT_HASH) -> None:
        self._algorithm, self._state = algorithm, HASH_ALGORITHMS[algorithm]()

    def update(self, data: Any) -> None:
        self._state.update(data)

    def text(self) -> str:
        return f"{self._algorithm}:{self._state.hexdigest()}"


def hash_of(content: bytes | memoryview) -> str:
    made = Hash()
    made.update(content)
    return made.text()


def algorithm_of(text: str) -> str:
    """Return the algorithm that made ``text``.

    Raises ValueError if it is not a hash of a known algorithm.
    """
    name, colon, digits = text.partition(":")
    if not colon or len(digits) != _DIGITS.get(name) or set(digits) - _HEXADECIMAL:
        raise ValueError(
            f"{text!r} is no hash; expected {' or '.join(HASH_ALGORITHMS)}, a colon "
            "and hexadecimal digits"
        )
    return name


def hash_of_file(
    path: AnyPath, algorithm: str = DEFAULT_HASH, tick: Callable[[int], None] | None = None
) -> str:
    """Return the hash of a file, read through a buffer of ``BLOCK`` bytes."""
    digest = Hash(algorithm)
    buffer = memoryview(bytearray(BLOCK))
    at = 0
    with closing(open_ranges(path)) as file:
        while count := file.read(buffer, at):
            digest.update(buffer[:count])
            at += count
            if tick is not None:
                tick(count)
    return digest.text()


@dataclass(frozen=True)
class BlockHashes:
    """Digests of consecutive blocks of ``size`` bytes, concatenated as hexadecimal."""

    size: int
    digests: str

    def to_json(self) -> dict[str, Any]:
        return {"algorithm": BLOCK_HASH, "size": self.size, "digests": self.digests}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BlockHashes:
        """Inverse of :meth:`to_json`. Raises ValueError for malformed ``data``."""
        size, digests = data["size"], data["digests"]
        if (
            data["algorithm"] != BLOCK_HASH
            or type(size) is not int
            or size <= 0
            or not isinstance(digests, str)
            or len(digests) % _BLOCK_DIGITS
            or set(digests) - _HEXADECIMAL
        ):
            raise ValueError(f"blocks have no sizes and digests of {BLOCK_HASH}")
        return cls(size, digests)

    def __len__(self) -> int:
        return len(self.digests) // _BLOCK_DIGITS

    def match(self, block: int, content: Any) -> bool:
        """Whether ``content`` equals block number ``block`` as it was written."""
        at = block * _BLOCK_DIGITS
        return xxhash.xxh3_64_hexdigest(content) == self.digests[at : at + _BLOCK_DIGITS]


def block_lengths(stretch: int, size: int) -> list[int]:
    """Return the lengths of the blocks of a header or tensor of ``stretch`` bytes."""
    return [min(size, stretch - at) for at in range(0, stretch, size)]


@dataclass(frozen=True)
class FileHashes:
    """Hash of a rank file, and the hashes of its blocks."""

    whole: str
    blocks: BlockHashes


class FileHasher:
    """Incremental hasher of a rank file and its blocks. ``stretches`` are the lengths of the header
    and of each tensor, in order.
    """

    def __init__(self, stretches: Iterable[int]) -> None:
        lengths = [*stretches]
        self._size = MIN_BLOCK
        while self._size * MOST_BLOCKS < sum(lengths):
            self._size *= 2
        self._lengths = (one for each in lengths for one in block_lengths(each, self._size))
        self._whole, self._block = Hash(), xxhash.xxh3_64()
        self._left = next(self._lengths, 0)  # bytes still missing of the current block
        self._digests: list[str] = []

    def update(self, data: memoryview) -> None:
        while len(data):
            part = data[: self._left]
            self._whole.update(part)
            self._block.update(part)
            data, self._left = data[len(part) :], self._left - len(part)
            if not self._left:
                self._digests.append(self._block.hexdigest())
                self._block.reset()
                self._left = next(self._lengths, 0)

    def result(self) -> FileHashes:
        return FileHashes(self._whole.text(), BlockHashes(self._size, "".join(self._digests)))
