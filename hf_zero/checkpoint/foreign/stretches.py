"""What ``torch.save`` wrote into a part of a file, as torch.distributed.checkpoint does: read
whole, or a tensor of it by ranges.
"""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint.storage import read_all
from hf_zero.checkpoint.tensorfile import bytes_view
from hf_zero.errors import CheckpointError


class _Stretch(io.RawIOBase):
    """``length`` bytes of ``file`` from ``offset`` on, as a file of their own: torch reads from
    it straight into place.
    """

    def __init__(self, file: io.FileIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = (
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        )
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        count = os.preadv(self._file.fileno(), [view], self._offset + self._at)
        self._at += count
        return count


def load(path: Path, offset: int, length: int, device: str = "cpu") -> Any:
    """What was saved in ``length`` bytes at ``offset`` of ``path``.

    Raises CheckpointError if that is damaged or would execute code.
    """
    try:
        with (
            open(path, "rb", buffering=0) as file,
            io.BufferedReader(_Stretch(file, offset, length)) as stretch,
        ):
            return torch.load(stretch, map_location=device, weights_only=True)
    except Exception as error:  # what is damaged makes the unpickler raise anything
        raise damaged(path, (str(error).splitlines() or [type(error).__name__])[0][:200]) from error


def damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged or missing ({what}); restore it, or name another checkpoint"
    )


class SavedTensor:
    """The tensor ``name`` of ``numel`` elements of ``dtype``, saved at ``offset`` of ``path``:
    ``read`` copies runs of its elements.

    torch gives the place of its bytes when it loads the tensor on the meta device. Where it does
    not, or the tensor is not contiguous, the tensor is loaded whole for each range.
    """

    def __init__(
        self, name: str, path: Path, offset: int, length: int, dtype: torch.dtype, numel: int
    ) -> None:
        self.name, self.path, self.offset, self.length, self.dtype, self.numel = (
            name,
            path,
            offset,
            length,
            dtype,
            numel,
        )
        self._place: int | None = None
        self._lock = threading.Lock()

    def read(self, start: int, out: torch.Tensor) -> None:
        """Fill ``out``, 1-D of this dtype, with elements from ``start`` on.

        Raises CheckpointError for a file that is damaged.
        """
        with self._lock:
            if self._place is None:
                self._place = self._find()
        if self._place < 0:
            out.copy_(
                load(self.path, self.offset, self.length)
                .detach()
                .reshape(-1)[start : start + out.numel()]
            )
            return
        view, at = bytes_view(out), self._place + start * self.dtype.itemsize
        with open(self.path, "rb", buffering=0) as file:
            if (count := read_all(file.fileno(), view, at)) < len(view):
                raise damaged(
                    self.path, f"it was cut short to {at + count} bytes while it was read"
                )

    def _find(self) -> int:
        """The byte of the file at which the elements begin, -1 if they are not known or not in
        order.
        """
        shell = load(self.path, self.offset, self.length, "meta")
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
        place = within + shell.storage_offset() * self.dtype.itemsize
        if place + self.numel * self.dtype.itemsize > self.length:
            raise damaged(
                self.path, f"{self.name!r} at byte {self.offset} reaches beyond its record"
            )
        return int(self.offset + place)
