"""Storage: named arrays of one flat buffer on one rank, on the device, in host memory or in files.

A parameter shard, master weights and moments are arrays over this rank's elements ``owned``. They
are processed in *sub-groups*, runs of elements that are short enough for a buffer (of one optimizer
group, for optimizer state; a parameter shard is one sub-group). An update prefetches a sub-group,
acquires it, changes its arrays and releases it; code that reads or loads a whole array calls fetch
and store. This module has the protocol and the two storages in memory; ``nvme.py`` has files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hf_zero.device import kinds
from hf_zero.ops.coded_arrays import ArrayCodec, CodedArray, StateArray, values_of

SHARD, MASTER = "shard", "master"  # MASTER is also the name in checkpoints (FORMAT.md)
COMPENSATION = "compensation"  # rounding errors of master weights, where they are kept
SubGroup = tuple[int, int]  # elements [start, stop) of owned
Allocator = Callable[[int, torch.dtype], torch.Tensor]  # (numel, dtype) -> zeros [numel]


@dataclass(frozen=True)
class StorageFormat:
    """Storage format of an array: elements of ``dtype``, or codes of a ``codec``.
    ``unquantized_sub_groups``: sub-groups that are stored in ``dtype`` even so.
    """

    dtype: torch.dtype
    codec: ArrayCodec | None = None
    unquantized_sub_groups: frozenset[int] = frozenset()

    def of(self, sub_group: int) -> StorageFormat:
        """Return the format of ``sub_group``."""
        return StorageFormat(self.dtype) if sub_group in self.unquantized_sub_groups else self


class StorageContents(Protocol):
    """What may be asked of a storage at any time: everything but the values of its arrays."""

    @property
    def offloaded(self) -> bool:
        """Return whether the arrays are elsewhere than on the compute device."""

    @property
    def sub_groups(self) -> Sequence[SubGroup]: ...

    def names(self) -> list[str]: ...

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the result of :meth:`ReadableStorage.fetch`."""

    def prefetch(self, sub_group: int) -> None:
        """Announce that ``sub_group`` will be acquired or fetched soon. Does not wait."""

    def entry(self, name: str) -> torch.Tensor:
        """Return the array's entry in the optimizer's state between steps: the array if it is in
        memory and not quantized, else a tensor of its shape without memory. Its values are read and
        written under a lease.
        """

    def nbytes(self) -> dict[str, int]:
        """Return the bytes by tier: ``device``, ``ram`` and ``disk``."""


class ReadableStorage(StorageContents, Protocol):
    """A storage under a lease for reading."""

    def fetch(self, name: str) -> torch.Tensor:
        """Return the whole array, [owned]: itself if it is in memory and not quantized, else a
        decoded copy in host memory.
        """

    def fetch_into(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill ``out`` (1-D, on any device) with the elements from ``start`` on, ordered by the
        current stream of its device.
        """


class Storage(ReadableStorage, Protocol):
    """The arrays of one flat buffer by name, addressed in elements of ``owned``."""

    def add(self, name: str, how: StorageFormat) -> None:
        """Add an array of zeros."""

    def store(self, name: str, start: int, values: torch.Tensor) -> None:
        """Overwrite elements from ``start`` on with ``values`` (1-D, any device, any dtype)."""

    def acquire(self, sub_group: int, overwrite: bool = False) -> dict[str, StateArray]:
        """Return the arrays of ``sub_group``, to be changed in place until :meth:`release`; until
        then further calls return the same arrays. With ``overwrite`` they are not read, because all
        values will be written.
        """

    def release(self, sub_group: int) -> None:
        """Keep the changes to ``sub_group``, if it was acquired."""

    def close(self) -> None:
        """Release memory and files."""


def overwrite(array: StateArray, start: int, values: torch.Tensor) -> None:
    """Overwrite elements of the array of one sub-group from ``start`` on."""
    if isinstance(array, CodedArray):
        whole = array.decode()
        whole[start : start + values.numel()].copy_(values)
        array.encode(whole)
    else:
        target = array[start : start + values.numel()]
        if target.data_ptr() != values.data_ptr() or target.dtype != values.dtype:
            target.copy_(values)


def size_in_memory(how: StorageFormat, numel: int) -> int:
    """Return the bytes that a sub-group of ``numel`` elements takes in host memory."""
    return numel * how.dtype.itemsize if how.codec is None else sum(how.codec.sizes(numel))


PAGE = 4096  # bytes: the alignment of direct transfers (``ALIGNMENT`` of ops/files.py)


def paged(nbytes: int) -> int:
    """Round ``nbytes`` up to a multiple of :data:`PAGE`."""
    return -(-nbytes // PAGE) * PAGE


def size_in_file(how: StorageFormat, numel: int) -> int:
    """Return the bytes that a sub-group of ``numel`` elements takes in a file."""
    sizes = (numel * how.dtype.itemsize,) if how.codec is None else how.codec.sizes(numel)
    return sum(map(paged, sizes))


class DeviceStorage:
    """Arrays in memory of the compute device: ``fetch`` returns the array without a copy."""

    offloaded = False

    def __init__(self, arrays: Mapping[str, torch.Tensor]):
        """Wrap ``arrays`` [owned] by name; empty for a flat buffer without state."""
        self._arrays = dict(arrays)
        self.sub_groups: Sequence[SubGroup] = [
            (0, array.numel()) for array in [*self._arrays.values()][:1]
        ]

    def names(self) -> list[str]:
        return list(self._arrays)

    def add(self, name: str, how: StorageFormat) -> None:
        like = next(iter(self._arrays.values()))
        self._arrays[name] = torch.zeros_like(like, dtype=how.dtype)

    def dtype(self, name: str) -> torch.dtype:
        return self._arrays[name].dtype

    def fetch(self, name: str) -> torch.Tensor:
        return self._arrays[name]

    def fetch_into(self, name: str, start: int, out: torch.Tensor) -> None:
        source = self._arrays[name][start : start + out.numel()]
        if source.data_ptr() != out.data_ptr():
            out.copy_(source, non_blocking=True)

    def store(self, name: str, start: int, values: torch.Tensor) -> None:
        target = self._arrays[name][start : start + values.numel()]
        if target.data_ptr() != values.data_ptr() or target.dtype != values.dtype:
            target.copy_(values, non_blocking=not kinds.is_synchronous(target.device))

    def prefetch(self, sub_group: int) -> None:
        """Do nothing: the array is in memory."""

    def acquire(self, sub_group: int, overwrite: bool = False) -> dict[str, StateArray]:
        return dict(self._arrays)

    def release(self, sub_group: int) -> None:
        """Do nothing: the array was changed in place."""

    def entry(self, name: str) -> torch.Tensor:
        return self._arrays[name]

    def nbytes(self) -> dict[str, int]:
        return {"device": sum(array.nbytes for array in self._arrays.values()), "ram": 0, "disk": 0}

    def close(self) -> None:
        self._arrays.clear()


class CastStorage(DeviceStorage):
    """A parameter shard in ``dtype`` without memory of its own: a read casts the ``master`` weights
    [owned] on the device. A write changes those that do not round to the written values already.
    """

    def __init__(self, master: torch.Tensor, dtype: torch.dtype):
        super().__init__({SHARD: master})
        self.master, self._dtype = master, dtype

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype

    def fetch(self, name: str) -> torch.Tensor:
        return self._arrays[name].to(self._dtype)

    def store(self, name: str, start: int, values: torch.Tensor) -> None:
        target = self._arrays[name][start : start + values.numel()]
        if values.dtype == self._dtype:
            source = values.to(target.device)
            same = source.view(torch.int16) == target.to(self._dtype).view(torch.int16)
            values = torch.where(same, target, source.to(target.dtype))
        super().store(name, start, values)

    def acquire(self, sub_group: int, overwrite: bool = False) -> dict[str, StateArray]:
        return {SHARD: self.fetch(SHARD)}

    def entry(self, name: str) -> torch.Tensor:
        return self.fetch(name)

    def nbytes(self) -> dict[str, int]:
        return {"device": 0, "ram": 0, "disk": 0}


class HostStorage:
    """Arrays in host memory: one tensor each, or blocks by sub-group if quantized."""

    offloaded = True

    def __init__(self, numel: int, sub_groups: Sequence[SubGroup], allocator: Allocator):
        self.sub_groups = list(sub_groups)
        self._numel = numel
        self._allocator = allocator
        self._whole: dict[str, torch.Tensor] = {}
        self._coded: dict[str, list[StateArray]] = {}

    def names(self) -> list[str]:
        return [*self._whole, *self._coded]

    def add(self, name: str, how: StorageFormat) -> None:
        if how.codec is not None:
            self._coded[name] = [
                self._allocator(stop - start, how.dtype)
                if sub_group in how.unquantized_sub_groups
                else how.codec.zeros(stop - start)
                for sub_group, (start, stop) in enumerate(self.sub_groups)
            ]
        else:
            self._whole[name] = self._allocator(self._numel, how.dtype)

    def dtype(self, name: str) -> torch.dtype:
        return self._whole[name].dtype if name in self._whole else torch.float32

    def fetch(self, name: str) -> torch.Tensor:
        if name in self._whole:
            return self._whole[name]
        out = torch.zeros(self._numel)
        self.fetch_into(name, 0, out)
        return out

    def fetch_into(self, name: str, start: int, out: torch.Tensor) -> None:
        stop = start + out.numel()
        if name in self._whole:
            source = self._whole[name][start:stop]
            if source.data_ptr() != out.data_ptr():
                out.copy_(source, non_blocking=True)
            return
        for (begin, end), array in zip(self.sub_groups, self._coded[name]):
            first, last = max(begin, start), min(end, stop)
            if first < last:
                values = values_of(array, first - begin, last - begin)
                out[first - start : last - start] = values

    def store(self, name: str, start: int, values: torch.Tensor) -> None:
        if name in self._whole:
            overwrite(self._whole[name], start, values)
            return
        for (begin, end), array in zip(self.sub_groups, self._coded[name]):
            first, last = max(begin, start), min(end, start + values.numel())
            if first < last:
                overwrite(array, first - begin, values[first - start : last - start])

    def prefetch(self, sub_group: int) -> None:
        """Do nothing: the array is in memory."""

    def acquire(self, sub_group: int, overwrite: bool = False) -> dict[str, StateArray]:
        start, stop = self.sub_groups[sub_group]
        whole = {name: array[start:stop] for name, array in self._whole.items()}
        return {**whole, **{name: arrays[sub_group] for name, arrays in self._coded.items()}}

    def release(self, sub_group: int) -> None:
        """Do nothing: the array was changed in place."""

    def entry(self, name: str) -> torch.Tensor:
        return self._whole[name] if name in self._whole else torch.zeros(1).expand(self._numel)

    def nbytes(self) -> dict[str, int]:
        whole = sum(array.nbytes for array in self._whole.values())
        blocks = sum(block.nbytes for array in self._coded.values() for block in array)
        return {"device": 0, "ram": whole + blocks, "disk": 0}

    def close(self) -> None:
        self._whole.clear()
        self._coded.clear()
