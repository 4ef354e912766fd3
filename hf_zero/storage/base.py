"""Storage: named arrays of one flat buffer on one rank, wherever they are kept.

A parameter shard, master weights and moments are arrays over this rank's elements ``owned``. They
are processed in *sub-groups*, runs of elements that are short enough for a buffer (of one optimizer
group, for optimizer state; a parameter shard is one sub-group). An update prefetches a sub-group,
acquires it, changes its arrays and releases it; code that reads or loads a whole array calls fetch
and store. Implementations: the compute device and host memory (``memory.py``), and files on disks
(``nvme.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hf_zero.ops.host import Blocks, Moment

SHARD, MASTER = "shard", "master"
SubGroup = tuple[int, int]  # elements [start, stop) of owned
Allocator = Callable[[int, torch.dtype], torch.Tensor]  # (numel, dtype) -> zeros [numel]


@dataclass(frozen=True)
class StorageFormat:
    """The format of an array's elements: numbers of a dtype, or 8-bit blocks."""

    dtype: torch.dtype
    blocks: bool = False
    signed: bool = True


class Storage(Protocol):
    """The arrays of one flat buffer by name, addressed in elements of ``owned``."""

    @property
    def offloaded(self) -> bool:
        """Whether the arrays are elsewhere than on the compute device."""

    @property
    def sub_groups(self) -> Sequence[SubGroup]: ...

    def names(self) -> list[str]: ...

    def add(self, name: str, how: StorageFormat) -> None:
        """Add an array of zeros."""

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the result of :meth:`fetch`."""

    def fetch(self, name: str) -> torch.Tensor:
        """Return the whole array in numbers: [owned]. The array itself if it is in memory and not
        quantised; else a copy in host memory.
        """

    def fetch_into(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill ``out`` (1-D, on any device) with the elements from ``start`` on, ordered by the
        current stream of its device.
        """

    def store(self, name: str, start: int, values: torch.Tensor) -> None:
        """Overwrite elements from ``start`` on with ``values`` (1-D, any device, any dtype)."""

    def prefetch(self, sub_group: int) -> None:
        """Announce that ``sub_group`` will be acquired or fetched soon. Does not wait."""

    def acquire(self, sub_group: int, overwrite: bool = False) -> dict[str, Moment]:
        """Return the arrays of ``sub_group``, to be changed in place until :meth:`release`; until
        then further calls return the same arrays. With ``overwrite`` they are not read, because all
        values will be written.
        """

    def release(self, sub_group: int) -> None:
        """Keep the changes to ``sub_group``, if it was acquired."""

    def entry(self, name: str) -> torch.Tensor:
        """Return the array's entry in the optimizer's state between steps: the array if it is in
        memory and not quantised, else a tensor of its shape without memory.
        """

    def nbytes(self) -> dict[str, int]:
        """Return the bytes by tier: ``device``, ``ram`` and ``disk``."""

    def close(self) -> None:
        """Release memory and files."""


def moment_format(moments: str, dtype: torch.dtype, signed: bool = True) -> StorageFormat:
    """Return the format of a moment of ``dtype`` if ``moments`` is ``"fp32"``, ``"bf16"`` or
    ``"int8"``.
    """
    if moments == "bf16":
        return StorageFormat(torch.bfloat16)
    return StorageFormat(dtype, blocks=moments == "int8", signed=signed)


def overwrite(array: Moment, start: int, values: torch.Tensor) -> None:
    """Overwrite elements of the array of one sub-group from ``start`` on."""
    if isinstance(array, Blocks):
        whole = array.decode()
        whole[start : start + values.numel()].copy_(values)
        array.encode(whole)
    else:
        own = array[start : start + values.numel()]
        if own.data_ptr() != values.data_ptr() or own.dtype != values.dtype:
            own.copy_(values)


def numbers(array: Moment) -> torch.Tensor:
    """Return the elements of the array of one sub-group: itself, or a decoded copy if quantised."""
    return array.decode() if isinstance(array, Blocks) else array
