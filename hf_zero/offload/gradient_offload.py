"""Copies of offloaded gradients from a GPU to host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hf_zero.device import streams
from hf_zero.device.spans import span
from hf_zero.offload.storage import Allocator
from hf_zero.ops import host

if TYPE_CHECKING:
    from hf_zero.zero.layout.gradients import GradientBuffer

STAGED = 2  # gradients in staging memory at once, to be added or cast by the host
# gradients whose GPU memory is kept for the copy; the host waits for the oldest, so that its lead
# over the device is bounded
UNDER_WAY = 4


@dataclass(eq=False)
class GradientCopy:
    """One gradient being copied."""

    gradient: GradientBuffer
    values: torch.Tensor  # on the GPU; kept until they have been copied
    copied: streams.Event
    staged: torch.Tensor | None
    adds: bool  # the staged values are added; else cast into the destination
    scale: float  # factor applied by the host


class GradientOffload:
    """Copies gradients on a stream of its own while the backward continues.

    ``allocator`` allocates memory that a GPU can copy to.
    """

    def __init__(self, device: torch.device, allocator: Allocator):
        self._device = device
        self._allocator = allocator
        self._stream: streams.Stream | None = None
        self._copies: list[GradientCopy] = []
        self.last: GradientBuffer | None = None  # the gradient sent last
        self._events: dict[GradientBuffer, streams.Event] = {}  # event of each one's last copy
        self._staging: list[torch.Tensor] = []

    def send(
        self, gradient: GradientBuffer, values: torch.Tensor, accumulate: bool, scale: float = 1.0
    ) -> None:
        """Begin ``gradient.shard = scale * values``, or ``+=``; done when :meth:`wait` returns.

        ``scale`` is 1 if the dtypes are equal and nothing is added.
        """
        if self._stream is None:
            self._stream = streams.side_stream(self._device, streams.Use.GRADIENTS)
        assert gradient.shard is not None
        target, staged = gradient.shard, None
        if accumulate or gradient.shard.dtype != values.dtype:
            staged = self._acquire(values.nbytes)
            target = staged[: values.nbytes].view(values.dtype)
        while len(self._copies) >= UNDER_WAY:
            self._finish_oldest()
        self._stream.wait_stream(streams.current_stream(self._device))
        with streams.on_stream(self._stream), span("copy_to_host", gradient.key, values.nbytes):
            target.copy_(values, non_blocking=True)
            self.last, self._events[gradient] = gradient, streams.record_event(self._stream)
            self._copies.append(
                GradientCopy(gradient, values, self._events[gradient], staged, accumulate, scale)
            )

    @property
    def is_adding(self) -> bool:
        """Return whether the host adds or casts a copy under way, from a staging buffer."""
        return any(copy.staged is not None for copy in self._copies)

    def event(self, gradient: GradientBuffer) -> streams.Event | None:
        """Return the end of the last copy of ``gradient``, None if none was sent. The host's
        addition may follow it.
        """
        return self._events.get(gradient)

    def _acquire(self, nbytes: int) -> torch.Tensor:
        while sum(copy.staged is not None for copy in self._copies) >= STAGED:
            self._finish_oldest()
        fitting = next(
            (index for index, memory in enumerate(self._staging) if memory.numel() >= nbytes), None
        )
        if fitting is not None:
            return self._staging.pop(fitting)
        if self._staging:
            self._staging.pop()  # replaced by a larger one
        return self._allocator(nbytes, torch.uint8)

    def _finish_oldest(self) -> None:
        copy = self._copies.pop(0)
        copy.copied.synchronize()
        if copy.staged is not None:
            assert copy.gradient.shard is not None
            values = copy.staged[: copy.values.nbytes].view(copy.values.dtype)
            _put(copy.gradient.shard, values, copy.adds, copy.scale)
            self._staging.append(copy.staged)

    def finish_sums(self) -> None:
        """Wait for the host's additions; plain copies may continue."""
        if self.is_adding:
            self.wait()

    def wait(self) -> None:
        """Wait for everything that was sent."""
        while self._copies:
            self._finish_oldest()

    def close(self) -> None:
        """Free everything and drop the gradients that were sent."""
        if self._stream is not None:
            self._stream.synchronize()
        self._copies, self._staging, self._events, self.last = [], [], {}, None


def _put(grad: torch.Tensor, values: torch.Tensor, adds: bool, scale: float) -> None:
    """Compute ``grad = scale * values``, or ``+=``, in host memory; host kernels add to fp32 and
    cast 32 bits and fewer, torch does the rest.
    """
    if adds and grad.dtype == torch.float32:
        host.accumulate(grad, values, scale)
    elif adds:
        grad.add_(values, alpha=scale)
    elif grad.dtype == torch.float64:
        grad.copy_(values).mul_(scale)
    else:
        host.cast(grad, values, scale)
