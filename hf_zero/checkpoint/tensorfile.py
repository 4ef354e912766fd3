"""The safetensors container and its hashes: headers planned before a byte is written, ranges read
and compared with the block hashes. file_writer.py writes the files.

The format: eight bytes with the header's length as a little-endian integer; the header, JSON; the
data. Offsets in the header count from the start of the data.

Hashes are stored with the name of their algorithm: 128-bit xxh3, which keeps up with any disk
(https://github.com/Cyan4973/xxHash), or SHA-256 in files of format version 1. They detect damage,
not tampering: whoever can change a file can change the manifest too. The hash of a file needs the
whole file. A rank file therefore also has hashes of blocks, so that a reader can verify any range
it reads. The header and each tensor are cut into blocks separately, from their first byte on, so
that a whole tensor is a whole number of blocks.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import xxhash

from hf_zero.checkpoint.storage import AnyPath, ClosedAtExit, open_ranges
from hf_zero.device.spans import span
from hf_zero.errors import CheckpointError
from hf_zero.logging import JsonObject, parse_json

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
MAX_BLOCKS = 1 << 16  # most blocks of a file, roughly: larger files have larger blocks


class Hash:
    """Incremental hash, as text ``<algorithm>:<hexadecimal digits>``."""

    def __init__(self, algorithm: str = DEFAULT_HASH) -> None:
        self._algorithm, self._state = algorithm, HASH_ALGORITHMS[algorithm]()

    def update(self, data: object) -> None:
        self._state.update(data)

    def text(self) -> str:
        return f"{self._algorithm}:{self._state.hexdigest()}"


def hash_of(content: bytes | memoryview) -> str:
    hasher = Hash()
    hasher.update(content)
    return hasher.text()


def algorithm_of(text: str) -> str:
    """Return the algorithm that made ``text``.

    Raises ValueError if it is not a hash of a known algorithm.
    """
    name, colon, digits = text.partition(":")
    if not colon or len(digits) != _DIGITS.get(name) or set(digits) - _HEXADECIMAL:
        raise ValueError(
            f"{text!r} is not a hash; expected {' or '.join(HASH_ALGORITHMS)}, a colon "
            "and hexadecimal digits"
        )
    return name


def hash_of_file(
    path: AnyPath, algorithm: str = DEFAULT_HASH, tick: Callable[[int], None] | None = None
) -> str:
    """Return the hash of a file, read through a buffer of as many bytes as suit its storage."""
    digest = Hash(algorithm)
    at = 0
    with closing(open_ranges(path)) as file:
        buffer = memoryview(bytearray(file.at_once))
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

    def to_json(self) -> JsonObject:
        return {"algorithm": BLOCK_HASH, "size": self.size, "digests": self.digests}

    @classmethod
    def from_json(cls, data: dict[str, object]) -> BlockHashes:
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

    def match(self, block: int, content: bytes | memoryview) -> bool:
        """Return whether ``content`` equals block number ``block`` as it was written."""
        at = block * _BLOCK_DIGITS
        return xxhash.xxh3_64_hexdigest(content) == self.digests[at : at + _BLOCK_DIGITS]


def block_lengths(stretch: int, size: int) -> list[int]:
    """Return the lengths of the blocks of a header or tensor of ``stretch`` bytes."""
    return [min(size, stretch - at) for at in range(0, stretch, size)]


@dataclass(frozen=True)
class FileHashes:
    """Hash of a rank file, and the hashes of its blocks."""

    file: str
    blocks: BlockHashes


class FileHasher:
    """Incremental hasher of a rank file and its blocks. ``stretches`` are the lengths of the header
    and of each tensor, in order.
    """

    def __init__(self, stretches: Iterable[int]) -> None:
        lengths = [*stretches]
        self._size = MIN_BLOCK
        while self._size * MAX_BLOCKS < sum(lengths):
            self._size *= 2
        self._lengths = (one for length in lengths for one in block_lengths(length, self._size))
        self._file, self._block = Hash(), xxhash.xxh3_64()
        self._left = next(self._lengths, 0)  # bytes still missing of the current block
        self._digests: list[str] = []

    def update(self, data: memoryview) -> None:
        while len(data):
            if not self._left:
                raise CheckpointError(
                    f"a file has at least {len(data):,} bytes more than its plan; save again, to "
                    "another tag"
                )
            part = data[: self._left]
            self._file.update(part)
            self._block.update(part)
            data, self._left = data[len(part) :], self._left - len(part)
            if not self._left:
                self._digests.append(self._block.hexdigest())
                self._block.reset()
                self._left = next(self._lengths, 0)

    def result(self) -> FileHashes:
        return FileHashes(self._file.text(), BlockHashes(self._size, "".join(self._digests)))


DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu, "C64": torch.complex64, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64,
    "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
# of what is written: safetensors' own reader for torch does not know F8_E8M0
CODES = {dtype: code for code, dtype in DTYPES.items() if code != "F8_E8M0"}
UNREAD = ("F4", "F6_E2M3", "F6_E3M2")  # dtypes of safetensors with parts of bytes
MAX_HEADER = 100_000_000  # the limit of the safetensors library
MAX_EXTENT = 1 << 63  # of the product of the sizes of a tensor other than 0
METADATA_KEY = "__metadata__"  # of safetensors' header, and no name of a tensor
DATA_ALIGNMENT = 4096  # of the data in a rank file, for direct I/O


def bytes_view(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor of any dtype as bytes, without a copy."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file. ``begin`` and ``end``: byte offsets from the start of its data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class FilePlan:
    """Plan of a file: its header and the place of every tensor."""

    entries: tuple[TensorEntry, ...]
    header: bytes

    @property
    def size(self) -> int:
        """Size of the finished file in bytes."""
        return len(self.header) + (self.entries[-1].end if self.entries else 0)

    @property
    def stretches(self) -> list[int]:
        """Lengths in bytes of the header and of each tensor, in order."""
        return [len(self.header), *(entry.nbytes for entry in self.entries)]


def plan_file(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]],
    metadata: Mapping[str, str],
    alignment: int = 8,
) -> FilePlan:
    """Place ``tensors`` (name, dtype, shape) one after another, wide dtypes first so that each is
    aligned.

    Raises CheckpointError for a dtype that safetensors does not have, and for the name of its
    metadata.
    """
    entries: list[TensorEntry] = []
    at = 0
    header: JsonObject = {METADATA_KEY: dict(metadata)}
    for name, dtype, shape in sorted(tensors, key=lambda item: -item[1].itemsize):
        if name == METADATA_KEY:
            raise CheckpointError(
                f"{name!r} cannot be the name of a tensor in a safetensors file; rename the "
                "parameter or buffer"
            )
        if dtype not in CODES:
            raise CheckpointError(
                f"{name!r} is of {dtype}, which safetensors files cannot hold; keep it as another "
                "dtype (a view of its bytes, say), or register it with persistent=False"
            )
        entries.append(
            TensorEntry(name, dtype, tuple(shape), at, at + math.prod(shape) * dtype.itemsize)
        )
        at = entries[-1].end
        header[name] = {
            "dtype": CODES[dtype],
            "shape": list(shape),
            "data_offsets": [entries[-1].begin, at],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return FilePlan(tuple(entries), struct.pack("<Q", len(text)) + text)


class TensorReader(Protocol):
    """A file of named tensors that is read by ranges: :class:`TensorFile`, or another program's."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]: ...

    def read_into(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill ``out``, 1-D, with elements of ``name`` from ``start`` on."""


class TensorFile(ClosedAtExit):
    """A safetensors file opened for reading ranges. Every number in its header is checked before
    use; what is read is compared with the hashes ``blocks``, if given.

    Raises CheckpointError for a file that cannot be read or whose header breaks the format.
    """

    def __init__(self, path: AnyPath, blocks: BlockHashes | None = None) -> None:
        self.path, self._blocks = path, blocks
        try:
            self._file = open_ranges(path)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be opened ({error.strerror}); restore the file, or load "
                "another tag of this run"
            ) from error
        try:
            self.size = self._file.size
            self.metadata, self.entries, self._data = self._read_header()
            if blocks is not None:
                self._number_blocks(blocks)
        except OSError as error:
            self._file.close()
            raise CheckpointError(
                f"{path} cannot be read ({error.strerror}); restore the file, or load "
                "another tag of this run"
            ) from error
        except BaseException:
            self._file.close()
            raise

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is damaged: {what}; restore the file, or load another tag of this run"
        )

    def _bytes(self, count: int, at: int) -> bytes:
        buffer = bytearray(count)
        return bytes(buffer[: self._file.read(memoryview(buffer), at)])

    def _read_header(self) -> tuple[dict[str, str], dict[str, TensorEntry], int]:
        start = self._bytes(8, 0)
        if len(start) < 8:
            raise self._damaged(f"it has {self.size} bytes, fewer than a header")
        length = struct.unpack("<Q", start)[0]
        if not length <= min(MAX_HEADER, self.size - 8):
            raise self._damaged(f"its header claims {length} bytes, the file has {self.size}")
        content = self._bytes(length, 8)
        self._header = start + content
        try:
            header = parse_json(content)
            metadata = header.pop(METADATA_KEY, {})
            if not isinstance(metadata, dict):
                raise TypeError("__metadata__ is not an object")
            for name, spec in header.items():
                self._refuse_dtype(name, spec["dtype"])
            entries = [
                TensorEntry(
                    name,
                    DTYPES[spec["dtype"]],
                    tuple(map(_as_size, spec["shape"])),
                    *map(_as_size, spec["data_offsets"]),
                )
                for name, spec in header.items()
            ]
            for entry in entries:
                entry.name.encode()  # no lone surrogate, which no other reader takes
                if math.prod(max(1, size) for size in entry.shape) >= MAX_EXTENT:
                    raise ValueError(f"{entry.name!r} has the shape {list(entry.shape)}")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise self._damaged(
                f"its header is not readable ({type(error).__name__}: {error})"
            ) from error
        at = 0
        for entry in sorted(entries, key=lambda e: (e.begin, e.end)):
            if entry.begin != at or entry.end - entry.begin != entry.numel * entry.dtype.itemsize:
                raise self._damaged(
                    f"tensor {entry.name!r} stands at bytes {entry.begin} to {entry.end}, "
                    f"expected a start at {at}"
                )
            at = entry.end
        if 8 + length + at != self.size:
            raise self._damaged(
                f"its tensors end at byte {8 + length + at}, the file at {self.size}"
            )
        return metadata, {entry.name: entry for entry in entries}, 8 + length

    def _refuse_dtype(self, name: str, code: object) -> None:
        """Raise CheckpointError for the ``code`` of a dtype that torch does not have."""
        if code in UNREAD:
            raise CheckpointError(
                f"{self.path} has {name!r} in {code}, which hf-zero does not read; convert it to "
                f"one of {', '.join(DTYPES)}"
            )

    def _number_blocks(self, blocks: BlockHashes) -> None:
        """Number the blocks of the header and of the tensors, in order of their bytes."""
        self._first: dict[str, int] = {}
        count = len(block_lengths(self._data, blocks.size))
        for entry in sorted(self.entries.values(), key=lambda e: (e.begin, e.end)):
            self._first[entry.name] = count
            count += len(block_lengths(entry.nbytes, blocks.size))
        if count != len(blocks):
            raise self._damaged(f"it has {count} blocks, the manifest has hashes of {len(blocks)}")
        self._compared = bytearray(count)  # 1 for each block whose hash was found equal

    def compare_header(self) -> None:
        """Raise CheckpointError if the header differs from its block hashes."""
        if self._blocks is not None:
            size = self._blocks.size
            for block, at in enumerate(range(0, self._data, size)):
                self._compare(block, self._header[at : at + size], at)
        self._header = b""

    def _compare(self, block: int, content: bytes | memoryview, at: int) -> None:
        assert self._blocks is not None
        if not self._blocks.match(block, content):
            raise self._damaged(
                f"bytes {at:,} to {at + len(content):,} are not those that were written "
                "(their hash is another one)"
            )
        self._compared[block] = 1

    def _read(self, entry: TensorEntry, start: int, view: memoryview) -> int:
        """Fill ``view`` with the bytes of ``entry`` from ``start`` on, and return the number of
        bytes read. Each block is compared with its hash at its first read; a block of which only a
        part is wanted is then read whole.
        """
        tensor, blocks = self._data + entry.begin, self._blocks
        if blocks is None:
            return self._file.read(view, tensor + start)
        taken = 0
        while taken < len(view):
            number, within = divmod(start + taken, blocks.size)
            begin, block = number * blocks.size, self._first[entry.name] + number
            length = min(blocks.size, entry.nbytes - begin)
            part = view[taken : taken + length - within]
            if len(part) == length:  # a whole block: read as many as suit one call of the storage
                whole_blocks = min(len(view) - taken, self._file.at_once) // blocks.size
                part = view[taken : taken + max(length, whole_blocks * blocks.size)]
                count = self._file.read(part, tensor + begin)
                if count == len(part):
                    for at in range(0, count, blocks.size):
                        run = part[at : at + blocks.size]
                        self._compare(block + at // blocks.size, run, tensor + begin + at)
            elif self._compared[block]:
                count = self._file.read(part, tensor + begin + within)
            else:
                whole = memoryview(bytearray(length))
                count = max(0, self._file.read(whole, tensor + begin) - within)
                if within + count == length:
                    self._compare(block, whole, tensor + begin)
                count = min(count, len(part))
                part[:count] = whole[within : within + count]
            taken += count
            if count < len(part):
                break
        return taken

    def read_into(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill ``out``, a contiguous CPU tensor of the entry's dtype, with elements from ``start``
        on.

        Raises CheckpointError for bytes that differ from those written.
        """
        entry = self.entries[name]
        view, at = bytes_view(out), self._data + entry.begin + start * entry.dtype.itemsize
        if out.dtype != entry.dtype or start < 0 or start + out.numel() > entry.numel:
            raise ValueError(
                f"{self.path}: {name!r} has {entry.numel} elements of {entry.dtype}; pass a range "
                f"of them, not {start} +{out.numel()}"
            )
        with span("read_file", name, len(view)):
            count = self._read(entry, start * entry.dtype.itemsize, view)
        if count < len(view):
            raise self._damaged(f"it was cut short to {at + count} bytes while it was read")

    def close(self) -> None:
        self._file.close()


def _as_size(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a size")
    return value
