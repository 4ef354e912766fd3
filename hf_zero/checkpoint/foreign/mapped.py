"""Ranges of tensors that are mapped from files, read from the files themselves.

A page that is read through a mapping counts as memory of this process as long as the mapping lasts:
a converter that copies from it would grow to the size of the checkpoint. So the place of a tensor
in its file is looked up, and ranges are read from there.
"""

from __future__ import annotations

import bisect
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_zero.checkpoint.storage import read_all
from hf_zero.checkpoint.tensorfile import bytes_view

MAPS = Path("/proc/self/maps")
_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ (\d+) +(/.*)")


@dataclass(frozen=True)
class Mapping:
    """Addresses ``[start, stop)`` are a file from ``offset`` on."""

    start: int
    stop: int
    offset: int
    inode: int
    path: str


class MappedFiles:
    """The files that are mapped when this is made.

    Where the system does not list them there are none, and ``read`` reads nothing.
    """

    def __init__(self) -> None:
        text = MAPS.read_text() if MAPS.exists() else ""
        found = [_LINE.fullmatch(line) for line in text.splitlines()]
        self._mappings = sorted(
            (
                Mapping(int(m[1], 16), int(m[2], 16), int(m[3], 16), int(m[4]), m[5])
                for m in found
                if m
            ),
            key=lambda m: m.start,
        )
        self._starts = [mapping.start for mapping in self._mappings]
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()

    def read(self, values: torch.Tensor, start: int, out: torch.Tensor) -> bool:
        """Fill ``out`` with elements of the 1-D ``values`` from ``start`` on.

        False, and nothing done, if no file is known to hold them.
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
            raise OSError(f"{mapping.path} was cut short while it was read")
        return True

    def _around(self, address: int, nbytes: int) -> Mapping | None:
        place = bisect.bisect_right(self._starts, address) - 1
        mapping = self._mappings[place] if place >= 0 else None
        return mapping if mapping is not None and address + nbytes <= mapping.stop else None

    def _file(self, mapping: Mapping) -> int:
        """The file opened, or -1 if what stands at its path is another one by now."""
        with self._lock:
            if mapping.path not in self._open:
                try:
                    fd = os.open(mapping.path, os.O_RDONLY)
                except OSError:  # removed since: the mapping still has it
                    fd = -1
                if fd >= 0 and os.fstat(fd).st_ino != mapping.inode:
                    os.close(fd)
                    fd = -1
                self._open[mapping.path] = fd
            return self._open[mapping.path]

    def close(self) -> None:
        for fd in self._open.values():
            if fd >= 0:
                os.close(fd)
        self._open.clear()
