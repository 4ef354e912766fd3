"""Storage in files: prefetched and written behind, through a bounded number of buffers
(``buffer_pool.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from hf_zero.device import streams
from hf_zero.ops.files import ALIGNMENT, Priority
from hf_zero.ops.host import BLOCK, Blocks, Moment
from hf_zero.storage.base import StorageFormat, SubGroup, numbers, overwrite
from hf_zero.storage.buffer_pool import BufferPool, FileBlock
from hf_zero.storage.nvme_files import FileExtent, NvmeFiles


def paged(nbytes: int) -> int:
    """Round ``nbytes`` up to a multiple of the alignment of direct transfers."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def size_in_file(how: StorageFormat, numel: int) -> int:
    """Return the bytes that a sub-group of ``numel`` elements takes."""
    if how.blocks:
        return paged(numel) + paged(4 * -(-numel // BLOCK))
    return paged(numel * how.dtype.itemsize)


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
        self._blocks: dict[int, FileBlock] = {}  # prefetched, or acquired
        self._unwritten: dict[int, dict[str, Moment]] = {}  # copies of arrays whose write failed

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
        return size_in_file(self._formats[name], stop - start)

    def _bytes(self, sub_group: int) -> int:
        return sum(self._size(name, sub_group) for name in self._formats)

    def _array(self, name: str, sub_group: int, memory: torch.Tensor) -> Moment:
        """Return the array of ``sub_group`` at the beginning of ``memory`` (bytes)."""
        start, stop = self.sub_groups[sub_group]
        numel, how = stop - start, self._formats[name]
        if how.blocks:
            scales, at = -(-numel // BLOCK), paged(numel)
            return Blocks(
                memory[:numel], memory[at : at + 4 * scales].view(torch.float32), how.signed
            )
        return memory[: numel * how.dtype.itemsize].view(how.dtype)

    def _parts(self, sub_group: int, memory: torch.Tensor) -> list[tuple[str, int, torch.Tensor]]:
        """Return each array of ``sub_group`` in a buffer: name, place in its extent, bytes."""
        parts, at = [], 0
        for name in self._formats:
            size = self._size(name, sub_group)
            parts.append((name, self._offsets[name][sub_group], memory[at : at + size]))
            at += size
        return parts

    # ---- sub-groups ----

    def prefetch(self, sub_group: int) -> None:
        pool = self._pool
        if not pool.prefetches or sub_group in self._blocks or sub_group in self._unwritten:
            return
        with pool.lock:
            if pool.is_writing(self, sub_group) or sub_group in self._unwritten:
                return
            memory = pool.acquire(must=False)
            if memory is not None:
                pool.add_prefetched(self._read(sub_group, memory, Priority.AHEAD))

    def acquire(self, sub_group: int, overwrite: bool = False) -> dict[str, Moment]:
        with self._pool.lock:
            block = self._blocks.get(sub_group)
            if block is not None:
                self._pool.remove_prefetched(block)
            else:
                self._pool.end_writes(self, sub_group)
                if sub_group in self._unwritten:
                    return self._unwritten[sub_group]
                memory = self._pool.acquire(must=True)
                assert memory is not None
                block = self._read(sub_group, memory, None if overwrite else Priority.NEEDED)
        if overwrite:
            block.end()  # ignore the result of a prefetch
            block.tickets = []
        try:
            block.wait()
        except BaseException:
            self._discard(sub_group)
            raise
        return block.arrays

    def _read(self, sub_group: int, memory: torch.Tensor, priority: Priority | None) -> FileBlock:
        """Put ``sub_group`` into ``memory``; read it with ``priority``, or not at all if None."""
        block = self._blocks[sub_group] = FileBlock(self, sub_group, memory, {})
        for name, offset, part in self._parts(sub_group, memory):
            block.arrays[name] = self._array(name, sub_group, part)
            if priority is not None:
                block.tickets.append(self._extents[name].read(offset, part, priority))
        return block

    def release(self, sub_group: int) -> None:
        with self._pool.lock:
            block = self._blocks.get(sub_group)
            if block is None or self._pool.is_prefetched(block):
                return  # kept in memory, or not acquired
            del self._blocks[sub_group]
            block.tickets = [
                self._extents[name].write(offset, part, Priority.BEHIND)
                for name, offset, part in self._parts(sub_group, block.memory)
            ]
            self._pool.write(block)

    def _discard(self, sub_group: int, copied: streams.Event | None = None) -> None:
        """Release the buffer of ``sub_group``, which is unchanged."""
        block = self._blocks.pop(sub_group, None)
        if block is not None:
            self._pool.remove_prefetched(block)
            block.end()
            self._pool.release(block.memory, copied)

    def drop_prefetched(self, sub_group: int) -> None:
        """Release the buffer that ``sub_group`` was prefetched into."""
        self._discard(sub_group)

    def _drop_all(self) -> None:
        with self._pool.lock:
            for sub_group in list(self._blocks):
                self._discard(sub_group)

    def keep(self, sub_group: int, arrays: dict[str, Moment]) -> None:
        """Keep a copy of ``arrays``, which could not be written."""
        self._unwritten[sub_group] = {
            name: Blocks(array.codes.clone(), array.scales.clone(), array.signed)
            if isinstance(array, Blocks)
            else array.clone()
            for name, array in arrays.items()
        }

    # ---- whole arrays ----

    def dtype(self, name: str) -> torch.dtype:
        how = self._formats[name]
        return torch.float32 if how.blocks else how.dtype

    def _overlaps(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return (sub-group, first, last) of the elements ``[start, stop)``."""
        found = []
        for sub_group, (begin, end) in enumerate(self.sub_groups):
            first, last = max(begin, start), min(end, stop)
            if first < last:
                found.append((sub_group, first, last))
        return found

    def fetch(self, name: str) -> torch.Tensor:
        out = torch.empty(self._numel, dtype=self.dtype(name))
        self.fetch_into(name, 0, out)
        return out

    def fetch_into(self, name: str, start: int, out: torch.Tensor) -> None:
        alone = len(self._formats) == 1
        for sub_group, first, last in self._overlaps(start, start + out.numel()):
            begin, place = self.sub_groups[sub_group][0], out[first - start : last - start]
            with self._pool.lock:  # another thread may fetch the same sub-group
                before = self._blocks.get(sub_group)
                acquired = before is not None and not self._pool.is_prefetched(before)
                if alone:
                    array = numbers(self.acquire(sub_group)[name])
                else:
                    array = numbers(self._alone(name, sub_group))
                place.copy_(array[first - begin : last - begin], non_blocking=alone)
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

    def _alone(self, name: str, sub_group: int, fill: bool = True) -> Moment:
        """Read the array ``name`` of ``sub_group`` into separate memory, without the other arrays;
        without ``fill`` do not read, because it will be overwritten whole.
        """
        self._pool.end_writes(self, sub_group)
        if sub_group in self._unwritten:
            return self._unwritten[sub_group][name]
        size, offset = self._size(name, sub_group), self._offsets[name][sub_group]
        memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % ALIGNMENT :][:size]
        if fill:
            self._extents[name].read(offset, memory, Priority.NEEDED).wait()
        return self._array(name, sub_group, memory)

    def _store_alone(
        self, name: str, sub_group: int, start: int, values: torch.Tensor, whole: bool
    ) -> None:
        self._discard(sub_group)
        array = self._alone(name, sub_group, fill=not whole)
        overwrite(array, start, values)
        if sub_group in self._unwritten:
            return
        memory = array.codes if isinstance(array, Blocks) else array.view(torch.uint8)
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
