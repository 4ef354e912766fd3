"""Storage: named arrays of one flat buffer on one rank, wherever they live.

A parameter shard, master weights and moments are arrays over this rank's elements ``owned``. They
are worked on in *sub-groups*, runs of elements that are short enough for a buffer (of one optimizer
group, where they are optimizer state; a parameter shard is one sub-group). An update prefetches a
sub-group, acquires it, changes what it got and releases it; what reads or loads a whole array
fetches and stores. The rows are the compute device and host memory (``memory.py``) and files on
disks (``nvme.py``).
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
    """How the elements of an array are kept: as numbers of a dtype, or in 8-bit blocks."""

    dtype: torch.dtype
    blocks: bool = False
    signed: bool = True


class Storage(Protocol):
    """Arrays of one flat buffer by name, addressed in elements of ``owned``."""

    @property
    def offloaded(self) -> bool:
        """Whether they live elsewhere than on the compute device."""

    @property
    def sub_groups(self) -> Sequence[SubGroup]: ...

    def names(self) -> list[str]: ...

    def add(self, name: str, how: StorageFormat) -> None:
        """A new array of zeros."""

    def dtype(self, name: str) -> torch.dtype:
        """Of what :meth:`fetch` returns."""

    def fetch(self, name: str) -> torch.Tensor:
        """The whole array in numbers: [owned]. The array itself where it lies in memory in numbers;
        else a copy in host memory.
        """

    def fetch_into(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill ``out`` (1-D, on any device) with the elements from ``start`` on, in the order of
        the current stream of its device.
        """

    def store(self, name: str, start: int, values: torch.Tensor) -> None:
        """Overwrite elements from ``start`` on with ``values`` (1-D, any device, any dtype)."""

    def prefetch(self, sub_group: int) -> None:
        """Say that ``sub_group`` will be acquired or fetched soon. Waits for nothing."""

    def acquire(self, sub_group: int, overwrite: bool = False) -> dict[str, Moment]:
        """The arrays of ``sub_group``, to be changed in place until :meth:`release`; again the same
        ones until then. With ``overwrite`` their values need not be there: all will be written.
        """

    def release(self, sub_group: int) -> None:
        """Keep what has been changed in ``sub_group``, if it was acquired."""

    def entry(self, name: str) -> torch.Tensor:
        """What the optimizer's books have between steps: the array if it is in memory and made
        of numbers, else one like it without memory.
        """

    def nbytes(self) -> dict[str, int]:
        """Bytes by tier: ``device``, ``ram`` and ``disk``."""

    def close(self) -> None:
        """Give memory and files back."""


def moment_format(moments: str, dtype: torch.dtype, signed: bool = True) -> StorageFormat:
    """How a moment of ``dtype`` is kept where ``moments`` is ``"fp32"``, ``"bf16"`` or
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
    """The elements of the array of one sub-group: itself, or a copy where it is quantised."""
    return array.decode() if isinstance(array, Blocks) else array
