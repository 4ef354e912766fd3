"""A bounded number of buffers of host memory, through which everything passes that one kind of
storage keeps in files.

[Note: a disk that fails]
A sub-group that cannot be written stays in memory, and the update goes on: after it, every one is
of the same step and can still be saved. :attr:`BufferPool.write_error` then tells the engine not to
begin another update.
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
    """The storage whose sub-group is in a buffer."""

    def keep(self, sub_group: int, arrays: dict[str, Moment]) -> None:
        """``arrays`` could not be written: hold a copy of them from now on."""

    def drop_prefetched(self, sub_group: int) -> None:
        """Give the buffer back that ``sub_group`` was read into ahead."""


@dataclass(eq=False)
class FileBlock:
    """A buffer and the sub-group that is in it.

    ``tickets`` are of the read it waits for, or of the write that has begun.
    """

    owner: Owner
    sub_group: int
    memory: torch.Tensor
    arrays: dict[str, Moment]
    tickets: list[Any] = field(default_factory=list)

    def wait(self) -> None:
        """Return when the transfers are over. Raises OSError."""
        while self.tickets:
            self.tickets[0].wait()
            self.tickets.pop(0)

    def end(self) -> None:
        """Wait for transfers whose outcome no longer matters, because the buffer must not be used
        under them.
        """
        for ticket in self.tickets:
            try:
                ticket.wait()
            except OSError:
                continue


def pool_size(count: int) -> int:
    """Buffers of a pool that is to have ``count``: two at least, one of which may be held by the
    thread that updates while another thread reads through the other.
    """
    return max(2, count)


class BufferPool:
    """At most ``count`` buffers, of the size of the largest sub-group.

    Used from the thread that trains and from that of updates: a caller of several methods that
    belong together holds ``lock``.
    """

    def __init__(
        self, count: int, allocator: Allocator, prefetches: bool = True, write_behind: bool = True
    ):
        self.lock = threading.RLock()
        self.prefetches = prefetches and count > 1
        self.write_error: OSError | None = None  # of the first write that failed
        self._write_behind = write_behind
        self._count = count
        self._allocator = allocator
        self._size = 0
        # with the end of the last copy from each to the device
        self._free: list[tuple[torch.Tensor, streams.Event | None]] | None = None
        self._prefetched: dict[FileBlock, None] = {}  # the oldest first
        self._writing: list[FileBlock] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self._count * self._size

    def grow(self, size: int) -> None:
        """Make room for sub-groups of ``size`` bytes. Before the first of them is acquired."""
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
        """A free buffer: uint8. If it ``must`` be, a write is waited for, or what was read ahead is
        dropped; else None where none is free, or but one.
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
            # Latest first, for its memory is in the caches; but not one that the device still
            # reads, if there is another.
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
        """``memory`` is free, once the device has done ``copied``."""
        with self.lock:
            assert self._free is not None
            self._free.append((memory, copied))

    # ---- reads ahead ----

    def add_prefetched(self, block: FileBlock) -> None:
        """``block`` is being read; its buffer may be taken until :meth:`remove_prefetched`."""
        self._prefetched[block] = None

    def remove_prefetched(self, block: FileBlock) -> None:
        """``block`` is needed now."""
        self._prefetched.pop(block, None)

    def is_prefetched(self, block: FileBlock) -> bool:
        """Whether ``block`` was read ahead, and nothing has needed it yet."""
        return block in self._prefetched

    def _drop_oldest_prefetched(self) -> None:
        block = next(iter(self._prefetched))
        del self._prefetched[block]
        block.owner.drop_prefetched(block.sub_group)

    # ---- writes behind ----

    def write(self, block: FileBlock) -> None:
        """``block`` is being written; its buffer comes back when it has been."""
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
        """Wait for everything that is being written."""
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
