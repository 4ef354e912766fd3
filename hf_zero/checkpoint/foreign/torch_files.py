"""Loads from files that ``torch.save`` wrote, without running code from them: tensors, plain
values, numpy's numbers and arrays of them, and stand-ins for a few named classes.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_zero.errors import CheckpointError

# torch's list of allowed classes is global: a thread that leaves safe_globals would revoke it for
# another thread inside
_SAFE_GLOBALS_LOCK = threading.Lock()


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
        with _SAFE_GLOBALS_LOCK, torch.serialization.safe_globals([*allowed, *_of_numpy()]):
            # torch maps files in its zip format alone
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
    """Return the line of torch's message that names the object, else its first one."""
    lines = [
        line.strip()
        for line in str(error).splitlines()
        if "GLOBAL" in line or "Unsupported" in line
    ]
    return lines[0][:200] if lines else _first_line(error)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


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
        origins = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}
        self._at = origins[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        count = os.preadv(self._file.fileno(), [view], self._offset + self._at)
        self._at += count
        return count


def load_range(path: Path, offset: int, length: int, device: str = "cpu") -> Any:
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
        raise damaged(path, _first_line(error)) from error


def damaged(path: Path, what: str) -> CheckpointError:
    """Return the error for ``path``, of which ``what`` has shown that it is damaged."""
    return CheckpointError(
        f"{path} is damaged or missing ({what}); restore it, or name another checkpoint"
    )
