"""Parameter shards in files: one file region a flat, read ahead as the recorded order of gathers
tells, written behind.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch

from hf_zero.device import streams
from hf_zero.ops.files import Priority
from hf_zero.storage.states import Take
from hf_zero.storage.states_in_files import let_end, paged


class ShardBuffers:
    """The buffers through which the shards of one engine go: at most ``count`` are read ahead or
    written at once.

    The update writes shards from its own thread while others are being gathered: whoever uses the
    buffers holds ``lock``.
    """

    def __init__(self, count: int, take: Take):
        self.lock = threading.RLock()
        self._count = max(2, count)
        self._take = take
        self._size = 0
        # and the end of the copy from each
        self._free: list[tuple[torch.Tensor, streams.Event | None]] | None = None
        self._ahead: deque[StorageInFiles] = deque()
        self._writing: deque[tuple[StorageInFiles, torch.Tensor, Any]] = deque()
        self.trouble: OSError | None = None

    def grow(self, size: int) -> None:
        """Make room for shards of ``size`` bytes."""
        with self.lock:
            if size > self._size:
                self.flush()
                while self._ahead:
                    self._ahead.popleft().drop_ahead()
                for _, copied in self._free or ():
                    if copied is not None:
                        copied.synchronize()
                self._size, self._free = size, None

    @property
    def nbytes(self) -> int:
        return self._count * self._size

    def borrow(self, must: bool) -> torch.Tensor | None:
        if self._free is None:
            self._free = [(self._take(self._size, torch.uint8), None) for _ in range(self._count)]
        while self._writing and self._writing[0][2].done():
            self.end_write()
        if not self._free and must:
            if self._writing:
                self.end_write()
            else:
                assert self._ahead, "every buffer of shards is in use"
                self._ahead.popleft().drop_ahead()
        if len(self._free) <= (0 if must else 1):
            return None
        # Latest first, for its memory is in the caches; but not one that the device still reads, if
        # there is another.
        at = next(
            (at for at in reversed(range(len(self._free))) if _is_over(self._free[at][1])),
            0 if must else None,
        )
        if at is None:
            return None
        memory, copied = self._free.pop(at)
        if copied is not None:
            copied.synchronize()
        return memory

    def give_back(self, memory: torch.Tensor, copied: streams.Event | None = None) -> None:
        """``memory`` is free, once the device has done ``copied``."""
        assert self._free is not None
        self._free.append((memory, copied))

    def announced(self, storage: StorageInFiles) -> None:
        self._ahead.append(storage)

    def arrived(self, storage: StorageInFiles) -> None:
        self._ahead.remove(storage)

    def write(self, storage: StorageInFiles, memory: torch.Tensor, ticket: Any) -> None:
        self._writing.append((storage, memory, ticket))

    def end_write(self) -> None:
        """Wait for the oldest write. A shard that cannot be written stays in memory."""
        storage, memory, ticket = self._writing.popleft()
        try:
            ticket.wait()
        except OSError as error:
            self.trouble = self.trouble or error
            storage.keep(memory)
        self.give_back(memory)

    def flush(self) -> None:
        """Wait for everything that is being written."""
        with self.lock:
            while self._writing:
                self.end_write()

    def end_writes_of(self, storage: StorageInFiles) -> None:
        while any(each is storage for each, _, _ in self._writing):
            self.end_write()


def _is_over(copied: streams.Event | None) -> bool:
    return copied is None or copied.query()


class StorageInFiles:
    """The shard of one flat: ``numel`` elements in a region of ``tier``."""

    def __init__(
        self,
        key: str,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        tier: Any,
        buffers: ShardBuffers,
    ):
        self.dtype = dtype
        self._numel = numel
        self._device = device
        self._bytes = paged(numel * dtype.itemsize)
        self._region = tier.allocate(key, self._bytes)
        self._buffers = buffers
        # read ahead: its memory and its ticket
        self._coming: tuple[torch.Tensor, Any] | None = None
        self._open: torch.Tensor | None = None  # being filled through in_host_memory
        self._kept: torch.Tensor | None = None  # could not be written
        buffers.grow(self._bytes)

    def _numbers(self, memory: torch.Tensor) -> torch.Tensor:
        return memory[: self._numel * self.dtype.itemsize].view(self.dtype)

    def _read(self) -> torch.Tensor:
        """The whole shard, of which nothing is being written, in a buffer that is to be given
        back.
        """
        if self._coming is not None:
            (memory, ticket), self._coming = self._coming, None
            self._buffers.arrived(self)
        else:
            borrowed = self._buffers.borrow(must=True)
            assert borrowed is not None
            memory = borrowed
            ticket = self._region.read(0, memory[: self._bytes], Priority.NEEDED)
        try:
            ticket.wait()
        except BaseException:
            self._buffers.give_back(memory)
            raise
        return memory

    def fetch(self, start: int, stop: int) -> torch.Tensor:
        out = torch.empty(stop - start, dtype=self.dtype, device=self._device)
        self.fetch_into(start, out)
        return out

    def fetch_into(self, start: int, out: torch.Tensor) -> None:
        with self._buffers.lock:
            self._buffers.end_writes_of(self)
            if self._kept is not None:
                out.copy_(self._kept[start : start + out.numel()])
                return
            memory = self._read()
            out.copy_(self._numbers(memory)[start : start + out.numel()], non_blocking=True)
            self._buffers.give_back(memory, streams.record_here(out.device))

    def ahead(self, start: int, stop: int) -> None:
        with self._buffers.lock:
            if self._coming is not None or self._kept is not None or self._open is not None:
                return  # it is coming, or here, or about to be another one
            self._buffers.end_writes_of(self)
            memory = self._buffers.borrow(must=False)
            if memory is not None:
                self._coming = (memory, self._region.read(0, memory[: self._bytes], Priority.AHEAD))
                self._buffers.announced(self)

    def drop_ahead(self) -> None:
        """Give the buffer of a read ahead back: what it holds is old, or another shard needs it."""
        if self._coming is not None:
            (memory, ticket), self._coming = self._coming, None
            let_end(ticket)
            self._buffers.give_back(memory)

    def _forget_ahead(self) -> None:
        if self._coming is not None:
            self._buffers.arrived(self)
            self.drop_ahead()

    def open(self, start: int, stop: int) -> torch.Tensor:
        return torch.empty(stop - start, dtype=self.dtype)

    def store(self, start: int, values: torch.Tensor) -> None:
        with self._buffers.lock:
            self._forget_ahead()
            self._buffers.end_writes_of(self)
            if self._kept is not None:
                self._kept[start : start + values.numel()].copy_(values)
                return
            memory = (
                self._buffers.borrow(must=True) if values.numel() == self._numel else self._read()
            )
            assert memory is not None
            self._numbers(memory)[start : start + values.numel()].copy_(values)
            self._buffers.write(
                self, memory, self._region.write(0, memory[: self._bytes], Priority.BEHIND)
            )

    def in_host_memory(self, start: int, stop: int) -> torch.Tensor | None:
        with self._buffers.lock:
            if self._open is None:
                self._forget_ahead()
                self._buffers.end_writes_of(self)
                if self._kept is not None:
                    return self._kept[start:stop]
                self._open = self._buffers.borrow(must=True)
            assert self._open is not None
            return self._numbers(self._open)[start:stop]

    def complete(self) -> None:
        with self._buffers.lock:
            if self._open is not None:
                memory, self._open = self._open, None
                self._buffers.write(
                    self, memory, self._region.write(0, memory[: self._bytes], Priority.BEHIND)
                )

    def keep(self, memory: torch.Tensor) -> None:
        """Hold a copy of ``memory`` from now on."""
        self._kept = self._numbers(memory).clone()

    def nbytes(self) -> dict[str, int]:
        return {"device": 0, "ram": 0, "disk": self._bytes}

    def close(self) -> None:
        with self._buffers.lock:
            self._forget_ahead()
            self._buffers.end_writes_of(self)
            self._kept = None
