"""Host memory for tensors saved in a forward and consumed in its backward: slabs that are filled in
order and reused once they are empty.
"""

from __future__ import annotations

from collections import deque

import torch

from hf_zero.errors import HostMemoryError
from hf_zero.offload.storage import Allocator

# bytes of a slab: each new slab doubles the total, because pinning memory costs far more than using
# it
FIRST, MOST = 16 << 20, 256 << 20
ALIGN = 512  # bytes, as the device's allocator aligns


class HostRegion:
    """``nbytes`` of host memory: ``memory``, uint8.

    It returns to its slab when this object is destroyed.
    """

    __slots__ = ("_slab", "memory")

    def __init__(self, slab: _Slab, start: int, nbytes: int):
        self._slab = slab
        self.memory = slab.memory[start : start + nbytes]

    def __del__(self) -> None:
        self._slab.left.append(None)


class _Slab:
    def __init__(self, memory: torch.Tensor):
        self.memory = memory
        self.filled = 0  # bytes
        self.taken = 0  # regions
        # one entry for each freed region; any thread that frees a graph may append
        self.left: deque[None] = deque()

    def take(self, nbytes: int) -> HostRegion | None:
        if self.taken == len(self.left):
            self.filled = self.taken = 0
            self.left.clear()
        if self.filled + nbytes > self.memory.numel():
            return None
        region = HostRegion(self, self.filled, nbytes)
        self.filled += -(-nbytes // ALIGN) * ALIGN
        self.taken += 1
        return region


class Slabs:
    """Allocator of host memory for copies from and to the device, in slabs obtained from ``take``.

    Graphs are freed in reverse order, so slabs become empty one after the other.
    """

    def __init__(self, take: Allocator, first: int = FIRST, most: int = MOST):
        """``first`` is the number of bytes of the first slab, ``most`` the maximum of any, except
        for a slab with a single larger tensor.
        """
        self._take = take
        self._first, self._most = first, most
        self._slabs: list[_Slab] = []

    @property
    def nbytes(self) -> int:
        """The number of bytes in all slabs."""
        return sum(slab.memory.numel() for slab in self._slabs)

    def take(self, nbytes: int) -> HostRegion:
        """Return a region of ``nbytes``. Raises HostMemoryError if the host has no memory for
        another slab.
        """
        for slab in reversed(self._slabs):
            region = slab.take(nbytes)
            if region is not None:
                return region
        try:
            memory = self._take(
                max(nbytes, min(self._most, max(self._first, self.nbytes))), torch.uint8
            )
        except HostMemoryError as error:
            raise HostMemoryError(
                f"{nbytes / 1e9:.2f} GB of activations do not fit into host memory next to the "
                f"{self.nbytes / 1e9:.2f} GB that hold others "
                f"({error}); let blocks recompute them (activation_checkpointing.blocks), or use a "
                "smaller micro-batch or activation_offload.min_bytes "
                "above the size of what may stay on the device"
            ) from error
        self._slabs.append(_Slab(memory))
        region = self._slabs[-1].take(nbytes)
        assert region is not None
        return region

    def close(self) -> None:
        """Release all slabs; regions keep their memory alive until they are destroyed."""
        self._slabs = []
