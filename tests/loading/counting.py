"""A counter of the bytes actually read from checkpoint files, in the function that reads every
range.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hf_zero.checkpoint.tensorfile import TensorFile


@dataclass
class Read:
    bytes: int = 0


@contextmanager
def counting() -> Iterator[Read]:
    """The bytes that go through :meth:`TensorFile.read_into` meanwhile, of all threads."""
    read, original, lock = Read(), TensorFile.read_into, threading.Lock()

    def read_into(self: TensorFile, name: str, start: int, out: torch.Tensor) -> None:
        with lock:
            read.bytes += out.nbytes
        original(self, name, start, out)

    TensorFile.read_into = read_into  # type: ignore[method-assign]
    try:
        yield read
    finally:
        TensorFile.read_into = original  # type: ignore[method-assign]
