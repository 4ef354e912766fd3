"""Transfers of whole tensors to and from files that have names."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from hf_zero.ops.files import FileQueue, OpenFile, Priority, Ticket, TransferPart, open_direct


def open_file(path: str | Path) -> OpenFile:
    """Open the file at ``path``, past the page cache where its file system allows; create it if it
    is missing.
    """
    name = os.fspath(path)
    descriptor = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT, 0o600)
    return OpenFile(name, descriptor, open_direct(name))


def read(
    queue: FileQueue,
    file: OpenFile,
    offset: int,
    out: torch.Tensor,
    priority: Priority = Priority.NEEDED,
) -> Ticket:
    """Fill ``out`` from byte ``offset`` of ``file``."""
    return queue.transfer(False, [TransferPart(file, offset, 0, out.nbytes)], out, priority)


def write(
    queue: FileQueue,
    file: OpenFile,
    offset: int,
    data: torch.Tensor,
    priority: Priority = Priority.BEHIND,
) -> Ticket:
    """Write ``data`` at byte ``offset`` of ``file``."""
    return queue.transfer(True, [TransferPart(file, offset, 0, data.nbytes)], data, priority)
