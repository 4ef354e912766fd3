"""Storage in files: sub-groups are prefetched and written behind through a bounded number of
buffers in host memory.

[Note: a disk that fails]
A sub-group that cannot be written stays in memory, and the update continues: after it, all
sub-groups are of the same step and can still be saved. :attr:`BufferPool.write_error` then makes
the engine refuse another update.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from hf_zero.device import streams
from hf_zero.offload.nvme_files import FileExtent, NvmeFiles
from hf_zero.offload.storage import (
    Allocator,
    StorageFormat,
    SubGroup,
    overwrite,
    paged,
    size_in_file,
)
from hf_zero.ops.coded_arrays import CodedArray, StateArray, decoded
from hf_zero.ops.files import ALIGNMENT, Priority


@dataclass(eq=False)
class BufferedSubGroup:
    """A buffer and the sub-group in it.

    ``tickets``: the tickets of its pending read, or of the write that has begun.
    """

    owner: NvmeStorage
    sub_group: int
    memory: torch.Tensor
    arrays: dict[str, StateArray]
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
        self._prefetched: dict[BufferedSubGroup, None] = {}  # the oldest first
        self._writing: list[BufferedSubGroup] = []

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
        """Return a free buffer: uint8. With ``must``, wait for a write or drop what was prefetched
        if none is free; without, return None unless at least two are free, so that one remains.
        """
        with self.lock:
            if self._free is None:
                buffers = [self._allocator(self._size, torch.uint8) for _ in range(self._count)]
                self._free = [(memory, None) for memory in buffers]
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

    def add_prefetched(self, buffered: BufferedSubGroup) -> None:
        """Register ``buffered`` as being read; its buffer may be taken until its removal."""
        self._prefetched[buffered] = None

    def remove_prefetched(self, buffered: BufferedSubGroup) -> None:
        """Unregister ``buffered``, which is needed now."""
        self._prefetched.pop(buffered, None)

    def is_prefetched(self, buffered: BufferedSubGroup) -> bool:
        """Return whether ``buffered`` was prefetched and has not been used yet."""
        return buffered in self._prefetched

    def _drop_oldest_prefetched(self) -> None:
        buffered = next(iter(self._prefetched))
        del self._prefetched[buffered]
        buffered.owner.drop_prefetched(buffered.sub_group)

    def write(self, buffered: BufferedSubGroup) -> None:
        """Register ``buffered`` as being written; its buffer is freed after the write."""
        with self.lock:
            self._writing.append(buffered)
            if not self._write_behind:
                self._end_write(buffered)

    def is_writing(self, owner: NvmeStorage, sub_group: int) -> bool:
        """Return whether ``sub_group`` of ``owner`` is still being written."""
        with self.lock:
            self._reap()
            return any(
                buffered.owner is owner and buffered.sub_group == sub_group
                for buffered in self._writing
            )

    def end_writes(self, owner: NvmeStorage, sub_group: int | None = None) -> None:
        """Wait for the writes of ``owner``: of one sub-group, or of all."""
        with self.lock:
            for buffered in list(self._writing):
                if buffered.owner is owner and sub_group in (None, buffered.sub_group):
                    self._end_write(buffered)

    def flush(self) -> None:
        """Wait for all pending writes."""
        with self.lock:
            while self._writing:
                self._end_write(self._writing[0])

    def _reap(self) -> None:
        for buffered in [
            buffered for buffered in self._writing if all(t.done() for t in buffered.tickets)
        ]:
            self._end_write(buffered)

    def _end_write(self, buffered: BufferedSubGroup) -> None:
        try:
            buffered.wait()
        except OSError as error:
            self.write_error = self.write_error or error
            buffered.owner.keep(buffered.sub_group, buffered.arrays)
            buffered.end()
        self._writing.remove(buffered)
        self.release(buffered.memory)


def _is_over(copied: streams.Event | None) -> bool:
    return copied is None or copied.query()


class NvmeStorage:
    """Arrays in ``files``, an extent each; the array of each sub-group begins at a page."""

    offloaded = True

    def __init__(
        self,
        key: str,
        numel: int,
        sub_groups: Sequence[SubGroup],
        files: NvmeFiles,
        pool: BufferPool,
    ):
        self.sub_groups = list(sub_groups)
        self._key = key
        self._numel = numel
        self._files = files
        self._pool = pool
        self._formats: dict[str, StorageFormat] = {}
        self._extents: dict[str, FileExtent] = {}
        self._offsets: dict[str, list[int]] = {}  # offsets of the sub-groups in each extent
        self._buffered: dict[int, BufferedSubGroup] = {}  # prefetched, or acquired
        self._unwritten: dict[int, dict[str, StateArray]] = {}  # arrays whose write failed

    def names(self) -> list[str]:
        return list(self._formats)

    def add(self, name: str, how: StorageFormat) -> None:
        self._drop_all()
        self._formats[name] = how
        sizes = [self._size(name, sub_group) for sub_group in range(len(self.sub_groups))]
        self._offsets[name] = [0, *accumulate(sizes)]
        self._extents[name] = self._files.allocate(f"{self._key}.{name}", self._offsets[name][-1])
        self._pool.grow(max(map(self._bytes, range(len(self.sub_groups))), default=0))

    def _size(self, name: str, sub_group: int) -> int:
        start, stop = self.sub_groups[sub_group]
        return size_in_file(self._formats[name].of(sub_group), stop - start)

    def _bytes(self, sub_group: int) -> int:
        return sum(self._size(name, sub_group) for name in self._formats)

    def _array(self, name: str, sub_group: int, memory: torch.Tensor) -> StateArray:
        """Return the array of ``sub_group`` at the beginning of ``memory`` (bytes)."""
        start, stop = self.sub_groups[sub_group]
        numel, how = stop - start, self._formats[name].of(sub_group)
        if how.codec is not None:
            codes, scales = how.codec.sizes(numel)
            return how.codec.over(memory[:codes], memory[paged(codes) : paged(codes) + scales])
        return memory[: numel * how.dtype.itemsize].view(how.dtype)

    def _parts(self, sub_group: int, memory: torch.Tensor) -> list[tuple[str, int, torch.Tensor]]:
        """Return each array of ``sub_group`` in a buffer: name, place in its extent, bytes."""
        parts, at = [], 0
        for name in self._formats:
            size = self._size(name, sub_group)
            parts.append((name, self._offsets[name][sub_group], memory[at : at + size]))
            at += size
        return parts

    def prefetch(self, sub_group: int) -> None:
        pool = self._pool
        if not pool.prefetches or sub_group in self._buffered or sub_group in self._unwritten:
            return
        with pool.lock:
            # another thread may have acquired it since; a write that has failed makes it unwritten
            if (
                sub_group in self._buffered
                or pool.is_writing(self, sub_group)
                or sub_group in self._unwritten
            ):
                return
            memory = pool.acquire(must=False)
            if memory is not None:
                pool.add_prefetched(self._read(sub_group, memory, Priority.AHEAD))

    def acquire(self, sub_group: int, overwrite: bool = False) -> dict[str, StateArray]:
        with self._pool.lock:
            buffered = self._buffered.get(sub_group)
            if buffered is not None:
                self._pool.remove_prefetched(buffered)
            else:
                self._pool.end_writes(self, sub_group)
                if sub_group in self._unwritten:
                    return self._unwritten[sub_group]
                memory = self._pool.acquire(must=True)
                assert memory is not None
                buffered = self._read(sub_group, memory, None if overwrite else Priority.NEEDED)
        if overwrite:
            buffered.end()  # ignore the result of a prefetch
            buffered.tickets = []
        try:
            buffered.wait()
        except BaseException:
            self._discard(sub_group)
            raise
        return buffered.arrays

    def _read(
        self, sub_group: int, memory: torch.Tensor, priority: Priority | None
    ) -> BufferedSubGroup:
        """Put ``sub_group`` into ``memory``; read it with ``priority``, or not at all if None."""
        buffered = self._buffered[sub_group] = BufferedSubGroup(self, sub_group, memory, {})
        for name, offset, part in self._parts(sub_group, memory):
            buffered.arrays[name] = self._array(name, sub_group, part)
            if priority is not None:
                buffered.tickets.append(self._extents[name].read(offset, part, priority))
        return buffered

    def release(self, sub_group: int) -> None:
        with self._pool.lock:
            buffered = self._buffered.get(sub_group)
            if buffered is None or self._pool.is_prefetched(buffered):
                return  # kept in memory, or not acquired
            del self._buffered[sub_group]
            buffered.tickets = [
                self._extents[name].write(offset, part, Priority.BEHIND)
                for name, offset, part in self._parts(sub_group, buffered.memory)
            ]
            self._pool.write(buffered)

    def _discard(self, sub_group: int, copied: streams.Event | None = None) -> None:
        """Release the buffer of ``sub_group``, which is unchanged."""
        buffered = self._buffered.pop(sub_group, None)
        if buffered is not None:
            self._pool.remove_prefetched(buffered)
            buffered.end()
            self._pool.release(buffered.memory, copied)

    def drop_prefetched(self, sub_group: int) -> None:
        """Release the buffer that ``sub_group`` was prefetched into."""
        self._discard(sub_group)

    def _drop_all(self) -> None:
        with self._pool.lock:
            for sub_group in list(self._buffered):
                self._discard(sub_group)

    def keep(self, sub_group: int, arrays: dict[str, StateArray]) -> None:
        """Keep a copy of ``arrays``, which could not be written."""
        self._unwritten[sub_group] = {name: array.clone() for name, array in arrays.items()}

    def dtype(self, name: str) -> torch.dtype:
        how = self._formats[name]
        return how.dtype if how.codec is None else torch.float32

    def _overlaps(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return (sub-group, first, last) of the elements ``[start, stop)``."""
        overlaps = []
        for sub_group, (begin, end) in enumerate(self.sub_groups):
            first, last = max(begin, start), min(end, stop)
            if first < last:
                overlaps.append((sub_group, first, last))
        return overlaps

    def fetch(self, name: str) -> torch.Tensor:
        out = torch.empty(self._numel, dtype=self.dtype(name))
        self.fetch_into(name, 0, out)
        return out

    def fetch_into(self, name: str, start: int, out: torch.Tensor) -> None:
        alone = len(self._formats) == 1
        for sub_group, first, last in self._overlaps(start, start + out.numel()):
            begin, target = self.sub_groups[sub_group][0], out[first - start : last - start]
            with self._pool.lock:  # another thread may fetch the same sub-group
                before = self._buffered.get(sub_group)
                acquired = before is not None and not self._pool.is_prefetched(before)
                if alone:
                    array = decoded(self.acquire(sub_group)[name])
                else:
                    array = decoded(self._alone(name, sub_group))
                target.copy_(array[first - begin : last - begin], non_blocking=alone)
                if alone and not acquired:  # an acquired one is released by its user
                    self._discard(sub_group, streams.record_here(out.device))

    def store(self, name: str, start: int, values: torch.Tensor) -> None:
        for sub_group, first, last in self._overlaps(start, start + values.numel()):
            begin, part = self.sub_groups[sub_group][0], values[first - start : last - start]
            whole = (first, last) == self.sub_groups[sub_group]
            with self._pool.lock:
                if len(self._formats) == 1:
                    overwrite(self.acquire(sub_group, whole)[name], first - begin, part)
                    self.release(sub_group)
                else:
                    self._store_alone(name, sub_group, first - begin, part, whole)

    def _alone(self, name: str, sub_group: int, read: bool = True) -> StateArray:
        """Read the array ``name`` of ``sub_group`` into separate memory, without the other arrays;
        without ``read`` return memory as it is, because it will be overwritten whole.
        """
        self._pool.end_writes(self, sub_group)
        if sub_group in self._unwritten:
            return self._unwritten[sub_group][name]
        size, offset = self._size(name, sub_group), self._offsets[name][sub_group]
        memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % ALIGNMENT :][:size]
        if read:
            self._extents[name].read(offset, memory, Priority.NEEDED).wait()
        return self._array(name, sub_group, memory)

    def _store_alone(
        self, name: str, sub_group: int, start: int, values: torch.Tensor, whole: bool
    ) -> None:
        self._discard(sub_group)
        array = self._alone(name, sub_group, read=not whole)
        overwrite(array, start, values)
        if sub_group in self._unwritten:
            return
        memory = array.codes if isinstance(array, CodedArray) else array.view(torch.uint8)
        data = memory.as_strided((self._size(name, sub_group),), (1,))
        offset = self._offsets[name][sub_group]
        self._extents[name].write(offset, data, Priority.NEEDED).wait()

    def entry(self, name: str) -> torch.Tensor:
        return torch.zeros(1, dtype=self._formats[name].dtype).expand(self._numel)

    def nbytes(self) -> dict[str, int]:
        disk = sum(offsets[-1] for offsets in self._offsets.values())
        return {"device": 0, "ram": 0, "disk": disk}

    def close(self) -> None:
        self._drop_all()
        self._pool.end_writes(self)
        self._extents.clear()
        self._offsets.clear()
        self._formats.clear()
        self._unwritten.clear()
