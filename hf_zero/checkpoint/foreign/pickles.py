"""Pickled files of others, read without running anything of theirs: tensors, plain values, and
stand-ins for a few named classes.
"""

from __future__ import annotations

import pickle
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_zero.errors import CheckpointError

# torch keeps what is allowed for the whole process: one thread's end would take it from another
_ALLOWING = threading.Lock()


class Opaque:
    """Stands in for an object of a class that is not imported: its arguments and attributes, and
    nothing that acts.
    """

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


def load_pickle(path: Path, classes: tuple[str, ...]) -> Any:
    """What ``torch.save`` wrote to ``path``, its tensors mapped from the file; ``classes`` become
    :class:`Opaque`.

    Raises CheckpointError for a file that is damaged, and for one that holds an object of any other
    class.
    """
    # A class each: the unpickler finds a stand-in by its name.
    allowed: list[Any] = [(type(name.rpartition(".")[2], (Opaque,), {}), name) for name in classes]
    try:
        with _ALLOWING, torch.serialization.safe_globals([*allowed, *_of_numpy()]):
            return torch.load(path, map_location="cpu", mmap=_is_zip(path), weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is damaged, or holds an object that cannot be read without running "
            f"code ({_cause(error)}); "
            "load it in the program that wrote it and save it without that object"
        ) from error
    except Exception as error:  # what is damaged makes the unpickler raise anything
        raise CheckpointError(
            f"{path} cannot be read ({_cause(error)}); restore it, or name another checkpoint"
        ) from error


@cache
def _of_numpy() -> tuple[Any, ...]:
    """What arrays and scalars of numpy are made of, under its names before and after version 2:
    they hold bytes, and run nothing.
    """
    is_old = np.lib.NumpyVersion(np.__version__) < "2.0.0"
    core: Any = getattr(np, "core" if is_old else "_core")
    makers = (core.multiarray._reconstruct, core.multiarray.scalar)
    made = [
        (maker, f"numpy.{place}.multiarray.{maker.__name__}")
        for maker in makers
        for place in ("core", "_core")
    ]
    return (*made, np.ndarray, np.dtype, *{type(np.dtype(kind)) for kind in np.typecodes["All"]})


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
