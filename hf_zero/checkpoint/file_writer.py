"""Writer of tensor files at the speed of disk and hash: bypasses the page cache, and writes one
block while the next one is filled.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from hf_zero.checkpoint.object_store import Upload
from hf_zero.checkpoint.storage import BLOCK, AnyPath, is_remote
from hf_zero.checkpoint.tensorfile import (
    DATA_ALIGNMENT,
    FileHasher,
    FileHashes,
    FilePlan,
    bytes_view,
)
from hf_zero.device import kinds, streams
from hf_zero.device.spans import span

BLOCK_BYTES = 4 << 20  # size of each of the two blocks that tensors pass through
DIRECT_FROM = 1 << 20  # smallest file for which direct I/O is worth its set-up, in bytes


def copy_bytes(place: torch.Tensor, values: torch.Tensor, wait: bool = True) -> None:
    """Copy ``values``, 1-D on any device, to host memory ``place``: [bytes] of uint8. With ``wait``
    False a copy from a GPU may still be in progress on return.

    Host memory is copied by this thread alone: torch's thread pool would spin against the hashing
    thread and slow both down.
    """
    source = _as_bytes(values)
    if source.device.type == "cpu":
        target = place.numpy()
        target[:] = source.numpy()
    else:
        place.copy_(source, non_blocking=not wait)


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of ``values``, 1-D: [bytes] of uint8, without a copy if possible."""
    return values.resolve_conj().resolve_neg().contiguous().view(torch.uint8)


def aligned_buffer(nbytes: int, pin: bool = False) -> torch.Tensor:
    """Return memory for direct I/O: [nbytes] of uint8, aligned to :data:`DATA_ALIGNMENT`."""
    memory = torch.empty(nbytes + DATA_ALIGNMENT, dtype=torch.uint8, pin_memory=pin)
    return memory[-memory.data_ptr() % DATA_ALIGNMENT :][:nbytes]


class DirectFile:
    """A new file of ``size`` bytes, written sequentially, with direct I/O where the file system
    supports it.

    A checkpoint is not read again soon; its pages would evict those that training needs from the
    page cache.
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

        A remainder of less than a page at its end is written through the page cache, and so are all
        later writes.
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
        """Flush the file to the device (fsync)."""
        os.fsync(self._fd)

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *raised: object) -> None:
        os.close(self._fd)


def open_output(where: AnyPath, size: int) -> DirectFile | Upload:
    """Open a new file of ``size`` bytes, local or in an object store. Raises OSError."""
    return Upload(where, size) if is_remote(where) else DirectFile(where, size)


class _DoubleBuffer:
    """Two blocks of memory in turn: the caller's thread fills and hashes one while a writer thread
    writes the other.
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
        pin = kinds.initialized_accelerator() is not None
        self._blocks = [aligned_buffer(min(plan.size, BLOCK_BYTES), pin) for _ in range(2)]
        self._under_way: Future[None] | None = None  # the write of the second block
        self._used = 0  # bytes filled of the first block

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
        """Hash the filled block and submit its write. On return the other block can be filled."""
        data = bytes_view(self._blocks[0][: self._used])
        self._hasher.update(data)
        self._wait_for_write()
        self._under_way = self._writer.submit(self._output.write, data)
        self._blocks.reverse()
        self._used = 0
        if self._tick is not None:
            self._tick(len(data))

    def _wait_for_write(self) -> None:
        """Wait for the write in progress. Raises its error."""
        if self._under_way is not None:
            self._under_way.result()

    def end(self) -> FileHashes:
        """Write the rest and return the hashes of all data."""
        self.flush()
        self._wait_for_write()
        return self._hasher.result()


def write_tensors(
    path: AnyPath,
    plan: FilePlan,
    tensors: Mapping[str, torch.Tensor | Callable[[], torch.Tensor]],
    tick: Callable[[int], None] | None = None,
) -> FileHashes:
    """Write ``plan`` with the values of ``tensors`` to ``path``, flush it to the device and return
    its hashes.

    A tensor that has to be fetched is given as a function that returns it, and is released before
    the next one. Tensors may be on any device; they pass through two blocks of ``BLOCK_BYTES``
    bytes, so that no tensor is held twice.
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


def copy_to_memory(
    memory: torch.Tensor,
    plan: FilePlan,
    tensors: Mapping[str, torch.Tensor | Callable[[], torch.Tensor]],
    device: torch.device,
    start: int = 0,
) -> None:
    """Copy the file of ``plan`` with the values of ``tensors``, from byte ``start`` on, to
    ``memory``: [bytes] of uint8 on the host, as far as it reaches. On return, also by an exception,
    all copies from ``device`` have ended.
    """
    stop, at = min(start + memory.numel(), plan.size), len(plan.header)
    if start < at:
        header = torch.frombuffer(bytearray(plan.header[start:stop]), dtype=torch.uint8)
        copy_bytes(memory[: header.numel()], header)
    try:
        for entry in plan.entries:
            first, last = max(at + entry.begin, start), min(at + entry.end, stop)
            if first >= last:
                continue
            given = tensors[entry.name]
            values = (given if isinstance(given, torch.Tensor) else given()).detach().reshape(-1)
            part = _as_bytes(values)[first - at - entry.begin : last - at - entry.begin]
            copy_bytes(memory[first - start : last - start], part, wait=False)
            del given, values, part
    finally:
        # before training changes the state, and before the memory of a failed save is unpinned
        copied = streams.record_here(device)
        if copied is not None:
            copied.synchronize()


def write_image(path: AnyPath, parts: Iterable[memoryview], plan: FilePlan) -> FileHashes:
    """Write ``parts`` of the complete file of ``plan``, page-aligned in memory and all but the last
    one in size, to ``path``, flush it to the device and return its hashes.
    """
    hasher = FileHasher(plan.stretches)
    with span("write_file", path.name, plan.size), open_output(path, plan.size) as output:
        for part in parts:
            for start in range(0, len(part), BLOCK):
                hasher.update(part[start : start + BLOCK])
                output.write(part[start : start + BLOCK])
        output.flush()
    return hasher.result()
