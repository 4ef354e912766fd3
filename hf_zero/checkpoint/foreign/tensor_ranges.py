"""Ranges of tensors in files that ``torch.save`` wrote, read from the files themselves.

A page that is read through a mapping counts as memory of this process for as long as the mapping
exists: a converter that copies from it would grow to the size of the checkpoint. The position of a
tensor in its file is therefore looked up, and ranges are read from there.
"""

from __future__ import annotations

import bisect
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_zero.checkpoint.foreign.torch_files import damaged, load_range
from hf_zero.checkpoint.storage import read_all
from hf_zero.checkpoint.tensorfile import bytes_view


class SavedTensor:
    """A tensor ``name`` of ``numel`` elements of ``dtype``, saved at ``offset`` of ``path``.
    ``read`` copies ranges of its elements.

    torch reveals the position of its bytes when it loads the tensor on the meta device. If it does
    not, or the tensor is not contiguous, each range loads the whole tensor.
    """

    def __init__(
        self, name: str, path: Path, offset: int, length: int, dtype: torch.dtype, numel: int
    ) -> None:
        self.name, self.path, self.dtype = name, path, dtype
        self.offset, self.length, self.numel = offset, length, numel
        self._place: int | None = None
        self._lock = threading.Lock()

    def read(self, start: int, out: torch.Tensor) -> None:
        """Fill ``out``, 1-D of this dtype, with elements from ``start`` on.

        Raises CheckpointError for a damaged file.
        """
        with self._lock:
            if self._place is None:
                self._place = self._find()
        if self._place < 0:
            whole = load_range(self.path, self.offset, self.length).detach().reshape(-1)
            out.copy_(whole[start : start + out.numel()])
            return
        view, at = bytes_view(out), self._place + start * self.dtype.itemsize
        with open(self.path, "rb", buffering=0) as file:
            if (count := read_all(file.fileno(), view, at)) < len(view):
                raise damaged(
                    self.path, f"it was cut short to {at + count} bytes while it was read"
                )

    def _find(self) -> int:
        """Return the byte of the file at which the elements begin, -1 if it is unknown or the
        tensor is not contiguous.
        """
        shell = load_range(self.path, self.offset, self.length, "meta")
        if not isinstance(shell, torch.Tensor) or (shell.numel(), shell.dtype) != (
            self.numel,
            self.dtype,
        ):
            raise damaged(
                self.path,
                f"{self.name!r} at byte {self.offset} is not {self.numel} elements of {self.dtype}",
            )
        within = getattr(shell.untyped_storage(), "_checkpoint_offset", None)
        if within is None or not shell.is_contiguous():
            return -1
        offset = within + shell.storage_offset() * self.dtype.itemsize
        if offset + self.numel * self.dtype.itemsize > self.length:
            raise damaged(
                self.path, f"{self.name!r} at byte {self.offset} reaches beyond its record"
            )
        return int(self.offset + offset)


MAPS = Path("/proc/self/maps")  # of Linux; see proc_pid_maps(5)
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ (\d+) +(/.*)")


@dataclass(frozen=True)
class FileMapping:
    """A mapping of the file ``path`` from ``offset`` on to addresses ``[start, stop)``."""

    start: int
    stop: int
    offset: int
    inode: int
    path: str


class MappedFiles:
    """The files mapped by this process at construction.

    On a system that does not list them there are none, and ``read`` always returns False.
    """

    def __init__(self) -> None:
        text = MAPS.read_text() if MAPS.exists() else ""
        lines = [_MAPPING.fullmatch(line) for line in text.splitlines()]
        self._mappings = sorted(
            (
                FileMapping(int(m[1], 16), int(m[2], 16), int(m[3], 16), int(m[4]), m[5])
                for m in lines
                if m
            ),
            key=lambda m: m.start,
        )
        self._starts = [mapping.start for mapping in self._mappings]
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()

    def read(self, values: torch.Tensor, start: int, out: torch.Tensor) -> bool:
        """Fill ``out`` with elements of the 1-D ``values`` from ``start`` on, read from the mapped
        file.

        Returns False, and does nothing, if no file is known to hold them. Raises CheckpointError
        for a file that was cut short.
        """
        if (
            values.dtype != out.dtype
            or not values.is_contiguous()
            or not out.is_contiguous()
            or not out.numel()
        ):
            return False
        address = values.data_ptr() + start * values.element_size()
        mapping = self._around(address, out.numel() * out.element_size())
        fd = -1 if mapping is None else self._file(mapping)
        if mapping is None or fd < 0:
            return False
        view = bytes_view(out)
        if read_all(fd, view, mapping.offset + address - mapping.start) < len(view):
            raise damaged(Path(mapping.path), "it was cut short while it was read")
        return True

    def _around(self, address: int, nbytes: int) -> FileMapping | None:
        """Return the mapping that has all of the ``nbytes`` at ``address``."""
        index = bisect.bisect_right(self._starts, address) - 1
        mapping = self._mappings[index] if index >= 0 else None
        return mapping if mapping is not None and address + nbytes <= mapping.stop else None

    def _file(self, mapping: FileMapping) -> int:
        """Return the file's descriptor, -1 if it was removed or replaced since it was mapped."""
        with self._lock:
            if mapping.path not in self._open:
                try:
                    fd = os.open(mapping.path, os.O_RDONLY)
                except OSError:  # removed since; the mapping keeps the content
                    fd = -1
                if fd >= 0 and os.fstat(fd).st_ino != mapping.inode:
                    os.close(fd)
                    fd = -1
                self._open[mapping.path] = fd
            return self._open[mapping.path]

    def close(self) -> None:
        """Close the files that :meth:`read` has opened."""
        for fd in self._open.values():
            if fd >= 0:
                os.close(fd)
        self._open.clear()
