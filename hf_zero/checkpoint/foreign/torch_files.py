"""Reader of files that ``torch.save`` wrote, without running code from them: tensors, plain values,
and stand-ins for a few named classes. Reads a whole file, a part of a file as
torch.distributed.checkpoint writes it, or ranges of a mapped tensor from its file.

A page that is read through a mapping counts as memory of this process for as long as the mapping
exists: a converter that copies from it would grow to the size of the checkpoint. The position of a
tensor in its file is therefore looked up, and ranges are read from there.
"""

from __future__ import annotations

import bisect
import io
import math
import os
import pickle
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_zero.checkpoint.storage import read_all
from hf_zero.checkpoint.tensorfile import bytes_view
from hf_zero.errors import CheckpointError

# torch's list of allowed classes is global: a thread that leaves safe_globals would revoke it for
# another thread inside
_ALLOWING = threading.Lock()


class Opaque:
    """Inert stand-in for an object of a class that is not imported: arguments and attributes."""

    def __init__(self, *args: object) -> None:
        self.args = args

    def __setstate__(self, state: object) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


def load_pickle(path: Path, classes: tuple[str, ...]) -> Any:
    """Return what ``torch.save`` wrote to ``path``, with tensors mapped from the file. Objects of
    ``classes`` become :class:`Opaque`.

    Raises CheckpointError for a damaged file, and for one that holds an object of any other class.
    """
    # One stand-in class per name: the unpickler looks classes up by name.
    allowed = [(type(name.rpartition(".")[2], (Opaque,), {}), name) for name in classes]
    try:
        with _ALLOWING, torch.serialization.safe_globals([*allowed, *_of_numpy()]):
            return torch.load(path, map_location="cpu", mmap=_is_zip(path), weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is damaged, or holds an object that cannot be read without running "
            f"code ({_cause(error)}); "
            "load it in the program that wrote it and save it without that object"
        ) from error
    except Exception as error:  # a damaged file can make the unpickler raise anything
        raise CheckpointError(
            f"{path} cannot be read ({_cause(error)}); restore it, or name another checkpoint"
        ) from error


@cache
def _of_numpy() -> tuple[tuple[Callable[..., object], str], ...]:
    """Return stand-ins for the globals that pickled numpy arrays and scalars refer to, under the
    module names before and since numpy 2. numpy's own are not used: a dtype takes flags and
    addresses from the file, and crashes the process if they are wrong.
    """
    functions = [
        (maker, f"numpy.{package}.multiarray.{name}")
        for name, maker in (("_reconstruct", _empty_array), ("scalar", _scalar))
        for package in ("core", "_core")
    ]
    return (*functions, (_NumpyArray, "numpy.ndarray"), (_NumpyDtype, "numpy.dtype"))


class _NumpyDtype:
    """A numeric dtype of a pickled numpy array; any other one is refused."""

    def __init__(self, kind: str, align: bool = False, copy: bool = True) -> None:
        if not re.fullmatch(r"b1|[iu][1248]|f[248]|c(8|16)", kind):
            raise pickle.UnpicklingError(f"it holds a numpy array of dtype {kind!r}")
        self.dtype = np.dtype(kind)

    def __setstate__(self, state: tuple[object, ...]) -> None:
        order, plain = state[1], (None, None, None)
        if order not in ("<", ">", "=", "|") or state[2:5] != plain or len(state) != 8 or state[7]:
            raise pickle.UnpicklingError(f"it holds a numpy dtype with the state {state}")
        self.dtype = self.dtype.newbyteorder(order)


class _NumpyArray(np.ndarray):  # numpy's parameters are of no use here
    """An array of numbers whose bytes are those of its shape and dtype."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, is_fortran, values = state
        sizes = [type(size) is int and size >= 0 for size in shape]
        if not isinstance(kind, _NumpyDtype) or not isinstance(values, bytes) or not all(sizes):
            raise pickle.UnpicklingError("it holds a numpy array that is not one of numbers")
        if len(values) != math.prod(shape) * kind.dtype.itemsize:
            raise pickle.UnpicklingError(f"a numpy array of shape {shape} has {len(values)} bytes")
        plain: Any = (1, tuple(shape), kind.dtype, bool(is_fortran), values)
        super().__setstate__(plain)

    # as numpy's own class, for those who save it again
    def __reduce__(self) -> str | tuple[object, ...]:
        return np.asarray(self).__reduce__()


def _empty_array(*_: object) -> _NumpyArray:
    return _NumpyArray(0)


def _scalar(kind: _NumpyDtype, values: bytes) -> object:
    return np.frombuffer(values, kind.dtype, 1)[0]


def _is_zip(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


def _cause(error: Exception) -> str:
    lines = [
        line.strip()
        for line in str(error).splitlines()
        if "GLOBAL" in line or "Unsupported" in line
    ]
    return (lines or str(error).splitlines() or [type(error).__name__])[0][:200]


class _SavedRange(io.RawIOBase):
    """``length`` bytes of ``file`` from ``offset`` on, as a file object from which torch reads
    directly into place.
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
    """Return the object saved in ``length`` bytes at ``offset`` of ``path``.

    Raises CheckpointError if it is damaged or would execute code.
    """
    try:
        with (
            open(path, "rb", buffering=0) as file,
            io.BufferedReader(_SavedRange(file, offset, length)) as section,
        ):
            return torch.load(section, map_location=device, weights_only=True)
    except Exception as error:  # a damaged file can make the unpickler raise anything
        raise damaged(path, (str(error).splitlines() or [type(error).__name__])[0][:200]) from error


def damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged or missing ({what}); restore it, or name another checkpoint"
    )


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
        """Return the byte of the file at which the elements begin, -1 if it is unknown or the
        tensor is not contiguous.
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
        offset = within + shell.storage_offset() * self.dtype.itemsize
        if offset + self.numel * self.dtype.itemsize > self.length:
            raise damaged(
                self.path, f"{self.name!r} at byte {self.offset} reaches beyond its record"
            )
        return int(self.offset + offset)


MAPS = Path("/proc/self/maps")
_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ (\d+) +(/.*)")


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
        lines = [_LINE.fullmatch(line) for line in text.splitlines()]
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
        for fd in self._open.values():
            if fd >= 0:
                os.close(fd)
        self._open.clear()
