"""The safetensors container: headers planned before a byte is written, ranges read back, hashes of
files; file_writer.py writes it.

The format: eight bytes, the header's length as a little-endian integer; the header, JSON; the data.
Offsets in the header count from the start of the data.

Hashes are stored with the names of their algorithms: xxh3 of 128 bits, which keeps up with any disk
(https://github.com/Cyan4973/xxHash); SHA-256 in what version 1 wrote. A hash detects damage, not
malice: who can change a file can change the manifest too.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from hf_zero.checkpoint.storage import BLOCK, AnyPath, ClosedAtExit, open_ranges
from hf_zero.errors import CheckpointError
from hf_zero.spans import span

DEFAULT_HASH = "xxh3_128"
HASH_ALGORITHMS: dict[str, Callable[[], Any]] = {
    DEFAULT_HASH: xxhash.xxh3_128,
    "sha256": hashlib.sha256,
}
_DIGITS = {name: 2 * make().digest_size for name, make in HASH_ALGORITHMS.items()}


class Hash:
    """The hash of bytes as they come, as ``<algorithm>:<hexadecimal digits>``."""

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
    """The algorithm that made ``text``.

    Raises ValueError if it is no hash that can be computed here.
    """
    name, colon, digits = text.partition(":")
    if not colon or len(digits) != _DIGITS.get(name) or set(digits) - set("0123456789abcdef"):
        raise ValueError(
            f"{text!r} is no hash; expected {' or '.join(HASH_ALGORITHMS)}, a colon "
            "and hexadecimal digits"
        )
    return name


DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000  # the limit of the safetensors library
DATA_ALIGNMENT = 4096  # so that the data of a rank file can be read and written by direct I/O


def bytes_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as bytes, without a copy, for any dtype."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file: ``begin`` and ``end`` are bytes counted from the start of the file's
    data.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class FilePlan:
    """A file before it is written: its header and the place of every tensor."""

    entries: tuple[TensorEntry, ...]
    header: bytes

    @property
    def size(self) -> int:
        """Bytes of the finished file."""
        return len(self.header) + (self.entries[-1].end if self.entries else 0)


def plan_file(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]],
    metadata: Mapping[str, str],
    alignment: int = 8,
) -> FilePlan:
    """Place ``tensors`` (name, dtype, shape) one after another, wide dtypes first so that each
    stands aligned.

    Raises CheckpointError for a dtype that the format does not have.
    """
    entries: list[TensorEntry] = []
    at = 0
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    for name, dtype, shape in sorted(tensors, key=lambda item: -item[1].itemsize):
        if dtype not in CODES:
            raise CheckpointError(
                f"{name!r} is of {dtype}, which safetensors files cannot hold; keep it as another "
                "dtype (a view of its bytes, say), or "
                "register it with persistent=False"
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


def hash_of_file(
    path: AnyPath, algorithm: str = DEFAULT_HASH, tick: Callable[[int], None] | None = None
) -> str:
    """The hash of a file, read through a buffer of ``BLOCK`` bytes."""
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


class TensorFile(ClosedAtExit):
    """A safetensors file opened for reading ranges. Every number in its header is checked before it
    is used.

    Raises CheckpointError for a file that cannot be read or whose header breaks the format.
    """

    def __init__(self, path: AnyPath) -> None:
        self.path = path
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
        held = bytearray(count)
        return bytes(held[: self._file.read(memoryview(held), at)])

    def _read_header(self) -> tuple[dict[str, str], dict[str, TensorEntry], int]:
        start = self._bytes(8, 0)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 0 <= length <= min(MAX_HEADER, self.size - 8):
            raise self._damaged(f"its header claims {length} bytes, the file has {self.size}")
        try:
            header = json.loads(self._bytes(length, 8))
            metadata = header.pop("__metadata__", {})
            if not isinstance(metadata, dict):
                raise TypeError("__metadata__ is no object")
            entries = [
                TensorEntry(
                    name,
                    DTYPES[spec["dtype"]],
                    tuple(map(_natural, spec["shape"])),
                    *map(_natural, spec["data_offsets"]),
                )
                for name, spec in header.items()
            ]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
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

    def read_into(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill ``out``, a contiguous CPU tensor of the entry's dtype, with elements from
        ``start`` on.
        """
        entry = self.entries[name]
        view, at = bytes_view(out), self._data + entry.begin + start * entry.dtype.itemsize
        if out.dtype != entry.dtype or start < 0 or start + out.numel() > entry.numel:
            raise ValueError(
                f"{self.path}: {name!r} has {entry.numel} elements of {entry.dtype}; pass a range "
                f"of them, not {start} +{out.numel()}"
            )
        with span("read_file", name, len(view)):
            count = self._file.read(view, at)
        if count < len(view):
            raise self._damaged(f"it was cut short to {at + count} bytes while it was read")

    def close(self) -> None:
        self._file.close()


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value
