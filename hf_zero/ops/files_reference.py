"""The queue of ``kernels/cpu/files.cpp`` in plain Python: the fallback without a native core, and
the reference of its tests.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field

ALIGNMENT = 4096


class File:
    """An open file; its descriptors are closed with the last transfer that uses it."""

    def __init__(self, path: str, buffered: int, direct: int):
        self.path = path
        self.buffered = buffered
        self.direct_fd = direct
        self.direct = direct >= 0

    def __del__(self) -> None:
        os.close(self.buffered)
        if self.direct_fd >= 0:
            os.close(self.direct_fd)


@dataclass(eq=False)
class Transfer:
    """The transfer of one call."""

    write: bool
    pieces: list[tuple[File, int, int, int]]
    priority: int
    after: list[Transfer]
    piece: int = 0
    within: int = 0
    out: int = 0
    queued: bool = True
    finished: bool = False
    failure: tuple[int, str, int, int, bool] | None = None

    @property
    def failed(self) -> bool:
        return self.failure is not None


@dataclass
class Block:
    """One block of a transfer in progress."""

    transfer: Transfer
    file: File
    offset: int
    address: int
    bytes: int
    direct: bool
    got: int = 0
    error: int = 0
    at_end: bool = False
    bounce: mmap.mmap | None = field(default=None)


class ReferenceFileQueue:
    """Threads that read and write blocks in the order of their priorities."""

    engine = "python"
    refusal = ""

    def __init__(self, block_size: int, depth: int, engine: str, threads: int):
        self._block_size = block_size
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._queued: list[deque[Transfer]] = [deque(), deque(), deque()]
        self._stopping = False
        self._faults: list[tuple[bool, int, int, int, bool, int]] = []
        self._attempts = [0, 0]
        self._workers = [
            threading.Thread(target=self._serve, daemon=True) for _ in range(min(threads, depth))
        ]
        for worker in self._workers:
            worker.start()

    def submit(
        self,
        write: bool,
        pieces: list[tuple[File, int, int, int]],
        priority: int,
        after: list[Transfer],
    ) -> Transfer:
        transfer = Transfer(write, [piece for piece in pieces if piece[3] > 0], priority, after)
        with self._changed:
            if not transfer.pieces:
                transfer.queued = False
                transfer.finished = True
                return transfer
            self._queued[priority].append(transfer)
            for first in after:
                self._raise_priority(first, priority)
            self._changed.notify_all()
        return transfer

    def wait(self, transfer: Transfer) -> tuple[int, str, int, int, bool] | None:
        with self._changed:
            self._raise_priority(transfer, 0)
            while not transfer.finished:
                self._changed.wait()
        return transfer.failure

    def inject(self, faults: list[tuple[bool, int, int, int, bool, int]]) -> None:
        with self._changed:
            self._faults = faults
            self._attempts = [0, 0]

    def close(self, cancel: bool) -> None:
        if os.getpid() != self._process:
            return
        with self._changed:
            self._stopping = True
            if cancel:
                for line in self._queued:
                    for transfer in line:
                        transfer.failure = (
                            errno.ECANCELED,
                            transfer.pieces[transfer.piece][0].path,
                            0,
                            0,
                            False,
                        )
                        transfer.queued = False
                        if not transfer.out:
                            self._end(transfer)
                    line.clear()
            self._changed.notify_all()
        for worker in self._workers:
            worker.join()

    def _raise_priority(self, transfer: Transfer, priority: int) -> None:
        if priority >= transfer.priority or transfer.finished:
            return
        if transfer.queued:
            self._queued[transfer.priority].remove(transfer)
            self._queued[priority].append(transfer)
        transfer.priority = priority
        for first in transfer.after:
            self._raise_priority(first, priority)

    def _end(self, transfer: Transfer) -> None:
        transfer.after = []
        transfer.pieces = []  # a caller that keeps the ticket does not keep the file
        transfer.finished = True
        self._changed.notify_all()

    def _next(self) -> Block | None:
        for line in self._queued:
            for transfer in list(line):
                failed = next(
                    (first.failure for first in transfer.after if first.finished and first.failure),
                    None,
                )
                if failed is not None:
                    transfer.failure = failed
                    transfer.queued = False
                    line.remove(transfer)
                    self._end(transfer)
                elif all(first.finished for first in transfer.after):
                    return self._cut(transfer, line)
        return None

    def _cut(self, transfer: Transfer, line: deque[Transfer]) -> Block:
        file, start, address, length = transfer.pieces[transfer.piece]
        offset, remaining = start + transfer.within, length - transfer.within
        direct = file.direct and offset % ALIGNMENT == 0 and remaining >= ALIGNMENT
        if direct:
            nbytes = min(remaining - remaining % ALIGNMENT, self._block_size)
        elif file.direct:  # the rest of an unaligned block goes through the page cache
            nbytes = min(remaining, ALIGNMENT - offset % ALIGNMENT)
        else:
            nbytes = min(remaining, self._block_size)
        block = Block(transfer, file, offset, address + transfer.within, nbytes, direct)
        transfer.within += nbytes
        transfer.out += 1
        if transfer.within == length:
            transfer.within = 0
            transfer.piece += 1
            if transfer.piece == len(transfer.pieces):
                transfer.queued = False
                line.remove(transfer)
        return block

    def _serve(self) -> None:
        while True:
            with self._changed:
                while (block := self._next()) is None:
                    if self._stopping and not any(self._queued):
                        return
                    self._changed.wait()
            self._run(block)
            transfer = block.transfer
            with self._changed:
                if block.error and transfer.failure is None:
                    transfer.failure = (
                        block.error,
                        block.file.path,
                        block.offset + block.got,
                        block.bytes - block.got,
                        block.at_end,
                    )
                    if transfer.queued:
                        self._queued[transfer.priority].remove(transfer)
                        transfer.queued = False
                transfer.out -= 1
                if not transfer.out and not transfer.queued:
                    self._end(transfer)
            del block, transfer  # a file is closed with its last transfer, not with the one after

    def _run(self, block: Block) -> None:
        memory = memoryview((ctypes.c_char * block.bytes).from_address(block.address)).cast("B")
        target = memory
        if block.direct and block.address % ALIGNMENT:
            target = memoryview(mmap.mmap(-1, block.bytes))
            if block.transfer.write:
                target[:] = memory
        while block.got < block.bytes and not block.error:
            try:
                self._attempt(block, target)
            except OSError as error:
                if error.errno == errno.EINVAL and block.direct:
                    block.file.direct = block.direct = False
                elif error.errno not in (errno.EINTR, errno.EAGAIN):
                    block.error = error.errno or errno.EIO
        if target is not memory and not block.transfer.write and not block.error:
            memory[:] = target
        if not block.file.direct:
            os.posix_fadvise(block.file.buffered, block.offset, block.bytes, os.POSIX_FADV_DONTNEED)

    def _attempt(self, block: Block, target: memoryview) -> None:
        requested = block.bytes - block.got
        descriptor = block.file.direct_fd if block.direct else block.file.buffered
        if self._faults:
            requested, descriptor = self._faulty(block, requested, descriptor)
        part = target[block.got : block.got + requested]
        call = os.pwritev if block.transfer.write else os.preadv
        moved = call(descriptor, [part], block.offset + block.got)
        if moved == 0:
            block.error, block.at_end = errno.EIO, not block.transfer.write
        block.got += moved
        if block.got % ALIGNMENT:
            block.direct = False

    def _faulty(self, block: Block, requested: int, descriptor: int) -> tuple[int, int]:
        write = block.transfer.write
        with self._changed:
            self._attempts[write] += 1
            number = self._attempts[write]
        error = 0
        for of_writes, first, last, fails, shorten, milliseconds in self._faults:
            if of_writes != write or not first <= number <= last:
                continue
            time.sleep(milliseconds / 1000)
            error = fails
            if shorten and requested > 1:
                requested, descriptor = (requested // 2) | 1, block.file.buffered
        if error:
            raise OSError(error, os.strerror(error))
        return requested, descriptor
