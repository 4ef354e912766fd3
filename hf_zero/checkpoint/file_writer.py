"""Files of tensors, written as fast as the disk and the hash allow: past the page cache, one block
is written while the next one is filled.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from hf_zero.checkpoint.hashes import FileHasher, FileHashes
from hf_zero.checkpoint.storage import BLOCK, AnyPath, Upload, is_remote
from hf_zero.checkpoint.tensorfile import DATA_ALIGNMENT, FilePlan, bytes_view
from hf_zero.device import kinds
from hf_zero.device.spans import span

BLOCK_BYTES = 4 << 20  # bytes of each of the blocks that tensors pass through
DIRECT_FROM = 1 << 20  # bytes of a file from which on direct I/O is worth its set-up


def copy_bytes(place: torch.Tensor, values: torch.Tensor, wait: bool = True) -> None:
    """Copy ``values``, 1-D on any device, to host memory ``place``: [bytes] of uint8. From a GPU it
    may be under way still unless ``wait``.

    Host memory is copied by this thread alone: torch's team of threads spins against the one that
    hashes, and slows both.
    """
    source = values.resolve_conj().resolve_neg().contiguous().view(torch.uint8)
    if source.device.type == "cpu":
        target: Any = place.numpy()
        target[:] = source.numpy()
    else:
        place.copy_(source, non_blocking=not wait)


def aligned_buffer(nbytes: int, pin: bool = False) -> torch.Tensor:
    """Memory that direct I/O takes: [nbytes] of uint8 on a multiple of :data:`DATA_ALIGNMENT`."""
    memory = torch.empty(nbytes + DATA_ALIGNMENT, dtype=torch.uint8, pin_memory=pin)
    return memory[-memory.data_ptr() % DATA_ALIGNMENT :][:nbytes]


class DirectFile:
    """A new file of ``size`` bytes, written from its start to its end; past the page cache where
    its file system allows that.

    What a save writes is not read soon, and pages that it left in the cache would drive out those
    that training needs.
    """

    def __init__(self, path: Path, size: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._direct = size >= DIRECT_FROM and hasattr(os, "O_DIRECT")
        try:
            self._fd = os.open(path, flags | (os.O_DIRECT if self._direct else 0), 0o666)
        except OSError as error:
            if not self._direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self._direct, self._fd = False, os.open(path, flags, 0o666)

    def write(self, data: memoryview) -> None:
        """Append ``data``.

        What is no whole page at its end goes through the cache, and so does all that follows.
        """
        while len(data):
            part = data[: len(data) - len(data) % DATA_ALIGNMENT] if self._direct else data
            if not len(part):
                self._through_cache()
                continue
            try:
                data = data[os.write(self._fd, part) :]
            except OSError as error:
                if not self._direct or error.errno != errno.EINVAL:
                    raise
                self._through_cache()  # this file system wants another alignment

    def _through_cache(self) -> None:
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        self._direct = False

    def flush(self) -> None:
        """Have the device keep it."""
        os.fsync(self._fd)

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)


def open_output(where: AnyPath, size: int) -> DirectFile | Upload:
    """A new file of ``size`` bytes on this machine, or in an object store. Raises OSError."""
    return Upload(where, size) if is_remote(where) else DirectFile(where, size)


class _DoubleBuffer:
    """Two blocks of memory in turn: this thread fills one and hashes it, while a thread writes
    the other.
    """

    def __init__(
        self,
        output: DirectFile | Upload,
        plan: FilePlan,
        writer: ThreadPoolExecutor,
        tick: Callable[[int], None] | None,
    ) -> None:
        self._hasher = FileHasher(plan.stretches)
        self._output, self._writer, self._tick = output, writer, tick
        pin = kinds.in_use() is not None
        self._blocks = [aligned_buffer(min(plan.size, BLOCK_BYTES), pin) for _ in range(2)]
        self._under_way: Future[None] | None = None  # what still reads the second one
        self._used = 0  # bytes of the first one

    def take(self, flat: torch.Tensor) -> None:
        """Append the elements of ``flat``: [numel], on any device."""
        at, item = 0, flat.dtype.itemsize
        while at < flat.numel():
            count = min(flat.numel() - at, (self._blocks[0].numel() - self._used) // item)
            if count == 0:
                self.flush()
                continue
            copy_bytes(
                self._blocks[0][self._used : self._used + count * item], flat[at : at + count]
            )
            self._used, at = self._used + count * item, at + count
        if self._used == self._blocks[0].numel():
            self.flush()

    def flush(self) -> None:
        """Hash what was taken and have it written; the block that comes next is free when this
        returns.
        """
        data = bytes_view(self._blocks[0][: self._used])
        self._hasher.update(data)
        self.settle()
        self._under_way = self._writer.submit(self._output.write, data)
        self._blocks.reverse()
        self._used = 0
        if self._tick is not None:
            self._tick(len(data))

    def settle(self) -> None:
        """Return when nothing is being written. Raises what the write has met with."""
        if self._under_way is not None:
            self._under_way.result()

    def end(self) -> FileHashes:
        """The hashes of all that was taken, once it is written."""
        self.flush()
        self.settle()
        return self._hasher.result()


def write_tensors(
    path: AnyPath,
    plan: FilePlan,
    tensors: Mapping[str, torch.Tensor | Callable[[], torch.Tensor]],
    tick: Callable[[int], None] | None = None,
) -> FileHashes:
    """Write ``plan`` with the values of ``tensors`` to ``path``, flush it to the device and return
    its hashes.

    A tensor that has to be fetched first is given as what fetches it, and is let go before the next
    one. Tensors may be on any device; they pass through two blocks of ``FILLED`` bytes, so that no
    tensor is held twice.
    """
    with span("write_file", path.name, plan.size), open_output(path, plan.size) as output:
        with ThreadPoolExecutor(1) as writer:
            blocks = _DoubleBuffer(output, plan, writer, tick)
            blocks.take(torch.frombuffer(bytearray(plan.header), dtype=torch.uint8))
            for entry in plan.entries:
                given = tensors[entry.name]
                flat = (given if isinstance(given, torch.Tensor) else given()).detach().reshape(-1)
                blocks.take(flat)
                del given, flat
            hashes = blocks.end()
        output.flush()
    return hashes


def write_image(path: AnyPath, image: memoryview, plan: FilePlan) -> FileHashes:
    """Write ``image``, the whole file of ``plan`` on a page, to ``path``, flush it to the device
    and return its hashes.
    """
    hasher = FileHasher(plan.stretches)
    with span("write_file", path.name, len(image)), open_output(path, len(image)) as output:
        for start in range(0, len(image), BLOCK):
            hasher.update(image[start : start + BLOCK])
            output.write(image[start : start + BLOCK])
        output.flush()
    return hasher.result()
