"""The safetensors container: headers planned before a byte is written, ranges read and compared
with the block hashes. file_writer.py writes the files.

The format: eight bytes with the header's length as a little-endian integer; the header, JSON; the
data. Offsets in the header count from the start of the data.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.checkpoint.hashes import BlockHashes, block_lengths
from hf_zero.checkpoint.storage import AnyPath, ClosedAtExit, open_ranges
from hf_zero.device.spans import span
from hf_zero.errors import CheckpointError

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
DATA_ALIGNMENT = 4096  # of the data in a rank file, for direct I/O


def bytes_view(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor of any dtype as bytes, without a copy."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file. ``begin`` and ``end`` are byte offsets from the start of the file's
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

    Raises CheckpointError for a dtype that safetensors does not have.
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
        held = bytearray(count)
        return bytes(held[: self._file.read(memoryview(held), at)])

    def _read_header(self) -> tuple[dict[str, str], dict[str, TensorEntry], int]:
        start = self._bytes(8, 0)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 0 <= length <= min(MAX_HEADER, self.size - 8):
            raise self._damaged(f"its header claims {length} bytes, the file has {self.size}")
        content = self._bytes(length, 8)
        self._header = start + content
        try:
            header = json.loads(content)
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

    def _number_blocks(self, blocks: BlockHashes) -> None:
        """Number the blocks of the header and of the tensors, in order of their bytes."""
        self._first: dict[str, int] = {}
        count = len(block_lengths(self._data, blocks.size))
        for entry in sorted(self.entries.values(), key=lambda each: (each.begin, each.end)):
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

    def _compare(self, block: int, content: Any, at: int) -> None:
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
                        each = part[at : at + blocks.size]
                        self._compare(block + at // blocks.size, each, tensor + begin + at)
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


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value
