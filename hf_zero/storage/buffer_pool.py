"""A bounded number of host memory buffers, through which all transfers of one kind of file storage
go.

[Note: a disk that fails]
A sub-group that cannot be written stays in memory, and the update continues: after it, all
sub-groups are of the same step and can still be saved. :attr:`BufferPool.write_error` then makes
the engine refuse another update.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hf_zero.device import streams
from hf_zero.ops.host import Moment
from hf_zero.storage.base import Allocator


class Owner(Protocol):
    """The storage that owns the sub-group in a buffer."""

    def keep(self, sub_group: int, arrays: dict[str, Moment]) -> None:
        """Keep a copy of ``arrays``, which could not be written."""

    def drop_prefetched(self, sub_group: int) -> None:
        """Release the buffer that ``sub_group`` was prefetched into."""


@dataclass(eq=False)
class FileBlock:
    """A buffer and the sub-group in it.

    ``tickets`` are those of its pending read, or of the write that has begun.
    """

    owner: Owner
    sub_group: int
    memory: torch.Tensor
    arrays: dict[str, Moment]
    tickets: list[Any] = field(default_factory=list)

    def wait(self) -> None:
        """Wait until the transfers are over. Raises OSError."""
        while self.tickets:
            self.tickets[0].wait()
            self.tickets.pop(0)

    def end(self) -> None:
        """Wait for transfers and ignore their errors: their outcome no longer matters, but the
        buffer must not be used under them.
        """
        for ticket in self.tickets:
            try:
                ticket.wait()
            except OSError:
                continue


def pool_size(count: int) -> int:
    """Return the buffers of a pool that is to have ``count``: at least two, because the update
    thread may hold one while another thread reads through the other.
    """
    return max(2, count)


class BufferPool:
    """At most ``count`` buffers, of the size of the largest sub-group.

    Used by the training thread and by the update thread: a caller of several methods that must not
    be interleaved holds ``lock``.
    """

    def __init__(
        self, count: int, allocator: Allocator, prefetches: bool = True, write_behind: bool = True
    ):
        self.lock = threading.RLock()
        self.prefetches = prefetches and count > 1
        self.write_error: OSError | None = None  # the first failed write
        self._write_behind = write_behind
        self._count = count
        self._allocator = allocator
        self._size = 0
        # (buffer, end of the last copy from it to the device)
        self._free: list[tuple[torch.Tensor, streams.Event | None]] | None = None
        self._prefetched: dict[FileBlock, None] = {}  # the oldest first
        self._writing: list[FileBlock] = []

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers."""
        return self._count * self._size

    def grow(self, size: int) -> None:
        """Grow the buffers to ``size`` bytes, before any sub-group is acquired."""
        with self.lock:
            if size <= self._size:
                return
            self.flush()
            while self._prefetched:
                self._drop_oldest_prefetched()
            for _, copied in self._free or ():
                if copied is not None:
                    copied.synchronize()
            self._size, self._free = size, None

    def acquire(self, must: bool) -> torch.Tensor | None:
        """Return a free buffer: uint8. With ``must``, wait for a write or drop a prefetched block
        if none is free; without, return None unless at least two are free, so that one remains.
        """
        with self.lock:
            if self._free is None:
                made = [self._allocator(self._size, torch.uint8) for _ in range(self._count)]
                self._free = [(memory, None) for memory in made]
            self._reap()
            if must and not self._free:
                if self._writing:
                    self._end_write(self._writing[0])
                else:
                    assert self._prefetched, "more sub-groups are acquired than there are buffers"
                    self._drop_oldest_prefetched()
            if len(self._free) <= (0 if must else 1):
                return None
            # The most recently used first, whose memory is in the caches; but not one that the
            # device still reads, if there is another.
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

    def release(self, memory: torch.Tensor, copied: streams.Event | None = None) -> None:
        """Free ``memory``, from when the device has done ``copied``."""
        with self.lock:
            assert self._free is not None
            self._free.append((memory, copied))

    # ---- prefetched reads ----

    def add_prefetched(self, block: FileBlock) -> None:
        """Register a ``block`` being read; its buffer may be taken until its removal."""
        self._prefetched[block] = None

    def remove_prefetched(self, block: FileBlock) -> None:
        """Unregister ``block``, which is needed now."""
        self._prefetched.pop(block, None)

    def is_prefetched(self, block: FileBlock) -> bool:
        """Whether ``block`` was prefetched and has not been used yet."""
        return block in self._prefetched

    def _drop_oldest_prefetched(self) -> None:
        block = next(iter(self._prefetched))
        del self._prefetched[block]
        block.owner.drop_prefetched(block.sub_group)

    # ---- writes behind ----

    def write(self, block: FileBlock) -> None:
        """Register ``block`` as being written; its buffer is freed after the write."""
        with self.lock:
            self._writing.append(block)
            if not self._write_behind:
                self._end_write(block)

    def is_writing(self, owner: Owner, sub_group: int) -> bool:
        """Whether ``sub_group`` of ``owner`` is still being written."""
        with self.lock:
            self._reap()
            return any(
                block.owner is owner and block.sub_group == sub_group for block in self._writing
            )

    def end_writes(self, owner: Owner, sub_group: int | None = None) -> None:
        """Wait for the writes of ``owner``: of one sub-group, or of all."""
        with self.lock:
            for block in list(self._writing):
                if block.owner is owner and sub_group in (None, block.sub_group):
                    self._end_write(block)

    def flush(self) -> None:
        """Wait for all pending writes."""
        with self.lock:
            while self._writing:
                self._end_write(self._writing[0])

    def _reap(self) -> None:
        for block in [each for each in self._writing if all(t.done() for t in each.tickets)]:
            self._end_write(block)

    def _end_write(self, block: FileBlock) -> None:
        try:
            block.wait()
        except OSError as error:
            self.write_error = self.write_error or error
            block.owner.keep(block.sub_group, block.arrays)
            block.end()
        self._writing.remove(block)
        self.release(block.memory)


def _is_over(copied: streams.Event | None) -> bool:
    return copied is None or copied.query()
