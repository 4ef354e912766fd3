"""Copies of activations between device and host memory, asynchronous on a side stream; and the host
memory for tensors that a forward saves and its backward consumes: slabs that are filled in order
and reused once they are empty.

[Note: one stream]
All copies of a :class:`Streams` run on one stream, in the order of their calls, so a reused host
region cannot be overwritten before an earlier copy has read it. Before each copy the side stream
waits for the compute stream (which has launched the kernels that produce the values, or that used
the memory before). A compute stream waits for a copy, on the device, only before it uses the result
or may reuse the source, which is memory of the stream that saved it. The host never waits.
"""

from __future__ import annotations

from collections import deque

import torch

from hf_zero.device import streams
from hf_zero.errors import HostMemoryError
from hf_zero.offload.storage import Allocator

# bytes of a slab: each new slab doubles the total, because pinning memory costs far more than using
# it
FIRST, MOST = 16 << 20, 256 << 20
ALIGN = 512  # bytes, as the device's allocator aligns

Sent = tuple[streams.Event, streams.Stream]  # the end of a copy; the stream that uses its source


class Streams:
    """Asynchronous copies of a GPU. See the note."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = streams.side_stream(device, streams.Use.ACTIVATIONS)

    def send(self, source: torch.Tensor, target: torch.Tensor) -> Sent:
        """Copy ``source`` (uint8 on the device) to ``target`` in host memory; return a handle for
        :meth:`leave`, until which ``source`` must stay alive.
        """
        current = streams.current_stream(self._device)
        self._stream.wait_stream(current)
        with streams.on_stream(self._stream):
            target.copy_(source, non_blocking=True)
            return streams.record_event(self._stream), current

    def leave(self, sent: Sent) -> None:
        """Let the stream that was current at the copy ``sent`` reuse its source from now on,
        whichever is current now: a model may have branches on several.
        """
        copied, home = sent
        if not copied.query():
            home.wait_event(copied)

    def reload(self, source: torch.Tensor) -> Reloaded:
        """Start to copy ``source``, in host memory, to the device."""
        current = streams.current_stream(self._device)
        # Allocated on the compute stream: once freed, the memory is reused by later work of that
        # stream.
        values = torch.empty(source.numel(), dtype=torch.uint8, device=self._device)
        self._stream.wait_stream(current)
        with streams.on_stream(self._stream):
            values.copy_(source, non_blocking=True)
            return Reloaded(values, streams.record_event(self._stream), current)

    def close(self) -> None:
        """Wait until no copy is under way."""
        self._stream.synchronize()


class Reloaded:
    """A copy to the device, under way or complete: ``values`` allocated on stream ``home``; the
    event ``came`` marks the end of their copy.
    """

    __slots__ = ("_came", "_home", "_used", "_values")

    def __init__(self, values: torch.Tensor, came: streams.Event, home: streams.Stream):
        self._values, self._came, self._home = values, came, home
        self._used = False

    def use(self) -> torch.Tensor:
        """Return the values, uint8, for kernels launched from now on in the current stream."""
        current = streams.current_stream(self._values.device)
        current.wait_event(self._came)
        if current == self._home:
            self._used = True
        else:
            self._values.record_stream(current)
        return self._values

    def __del__(self) -> None:
        # freed memory returns to its stream, which must not write to it before the copy has
        if not self._used:
            self._home.wait_event(self._came)


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
        """Return a region of ``nbytes``. Raises HostMemoryError if the host lacks memory for it."""
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
                f"{self.nbytes / 1e9:.2f} GB that hold others ({error}); let blocks recompute them "
                "(activation_checkpointing.blocks), or use a smaller micro-batch or "
                "activation_offload.min_bytes above the size of what may stay on the device"
            ) from error
        self._slabs.append(_Slab(memory))
        region = self._slabs[-1].take(nbytes)
        assert region is not None
        return region

    def close(self) -> None:
        """Release all slabs; regions keep their memory alive until they are destroyed."""
        self._slabs = []
