"""Copies of new parameter shards from host kernels to the device."""

from __future__ import annotations

import torch

from hf_zero.device import streams
from hf_zero.device.spans import span
from hf_zero.storage.base import Allocator
from hf_zero.zero.layout.flat_buffer import FlatBuffer

# sub-groups being copied to a GPU at once: the small last one of a unit must not delay the next
STAGED = 3


class StagedCopies:
    """Host memory for the new elements of a sub-group, which are then copied to ``device``.

    ``allocator`` allocates memory that a GPU can copy from; ``largest`` is the maximum number of
    bytes of a sub-group's parameters. Used on the update thread.
    """

    def __init__(self, device: torch.device, largest: int, allocator: Allocator):
        self._device = device
        self._largest = largest
        self._allocator = allocator
        # the oldest first, each with the end of its copy
        self._staged: list[tuple[torch.Tensor, streams.Event | None]] = []
        self.stream: streams.Stream | None = None  # stream of the copies, created by the first

    def open(self) -> streams.Stream | None:
        """Create and return the stream of the copies."""
        if self.stream is None:
            self.stream = streams.side_stream(self._device, streams.Use.UPDATES)
        return self.stream

    def record(self) -> streams.Event | None:
        """Return an event at the end of the copies under way; None if there are none."""
        return streams.record_event(self.stream) if self.stream is not None else None

    def place(self, flat: FlatBuffer, start: int, stop: int) -> torch.Tensor | None:
        """Return host memory for the new elements ``[start, stop)`` of the parameter shard of
        ``flat``, in its dtype. Call :meth:`placed` once they are written.
        """
        own = flat.part_in_host_memory(start, stop)
        if own is not None:
            return own
        self.open()
        if len(self._staged) < STAGED:
            memory = self._allocator(self._largest, torch.uint8)
        else:
            memory, copied = self._staged.pop(0)
            if copied is not None:
                copied.synchronize()
        self._staged.append((memory, None))
        return memory[: (stop - start) * flat.dtype.itemsize].view(flat.dtype)

    def placed(self, flat: FlatBuffer, start: int, stop: int, values: torch.Tensor | None) -> None:
        """Copy ``values``, which have been written, unless the shard itself is in host memory."""
        if (
            values is None
            or self.stream is None
            or flat.part_in_host_memory(start, stop) is not None
        ):
            return
        with streams.on_stream(self.stream), span("copy_to_device", flat.key, values.nbytes):
            flat.store_part(start, values)
            memory, _ = self._staged[-1]
            self._staged[-1] = (memory, self.record())
