"""Copies of gradients from a GPU to the host memory that offloaded ones are kept in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_zero.device import streams
from hf_zero.device.spans import span
from hf_zero.ops import host
from hf_zero.storage.base import Allocator
from hf_zero.zero.layout.gradient_buffer import GradientBuffer

STAGED = 2  # gradients that are to be added to others, on their way at once
# gradients whose copy on the GPU is kept; the host waits for the oldest, so that it does not run
# ahead with all of them
UNDER_WAY = 4


@dataclass(eq=False)
class GradientCopy:
    """One gradient on its way."""

    gradient: GradientBuffer
    values: torch.Tensor  # on the GPU; kept until they have been copied
    copied: streams.Event
    staged: torch.Tensor | None
    adds: bool  # what was staged is added; else it is cast into the place of what was there
    scale: float  # by which it is multiplied there


class GradientOffload:
    """Copies on a stream of their own, while the backward goes on.

    ``allocator`` gives memory that a GPU can copy to.
    """

    copies = True

    def __init__(self, device: torch.device, allocator: Allocator):
        self._device = device
        self._allocator = allocator
        self._stream: streams.Stream | None = None
        self._copies: list[GradientCopy] = []
        self.last: GradientBuffer | None = None  # that was sent
        self._events: dict[GradientBuffer, streams.Event] = {}  # of each one's last copy
        self._staging: list[torch.Tensor] = []

    def send(
        self, gradient: GradientBuffer, values: torch.Tensor, accumulate: bool, scale: float = 1.0
    ) -> None:
        """``gradient.shard = scale * values``, or ``+=``; done when :meth:`wait` returns.

        ``scale`` is 1 where the dtypes are one and nothing is added.
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
        """Whether something is on its way that the host has to add or to cast."""
        return any(copy.staged is not None for copy in self._copies)

    def event(self, gradient: GradientBuffer) -> streams.Event | None:
        """The end of the last copy of ``gradient``; nothing if none was sent. What the host has to
        add may follow.
        """
        return self._events.get(gradient)

    def _acquire(self, nbytes: int) -> torch.Tensor:
        while sum(copy.staged is not None for copy in self._copies) >= STAGED:
            self._finish_oldest()
        fitting = next(
            (place for place, memory in enumerate(self._staging) if memory.numel() >= nbytes), None
        )
        if fitting is not None:
            return self._staging.pop(fitting)
        if self._staging:
            self._staging.pop()  # a larger one takes its place
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
        """Return when the host has added what it has to; copies may go on."""
        if self.is_adding:
            self.wait()

    def wait(self) -> None:
        """Return when all that was sent is there."""
        while self._copies:
            self._finish_oldest()

    def close(self) -> None:
        """Let go of everything: no gradient that was sent is wanted any more."""
        if self._stream is not None:
            self._stream.synchronize()
        self._copies, self._staging, self._events, self.last = [], [], {}, None


class NoGradientOffload:
    """In the place of :class:`GradientOffload` where gradients stay on the device that has reduced
    them, be it the host.
    """

    copies = False
    is_adding = False
    last: GradientBuffer | None = None

    def send(
        self, gradient: GradientBuffer, values: torch.Tensor, accumulate: bool, scale: float = 1.0
    ) -> None:
        """``gradient.shard = scale * values``, or ``+=``, at once."""
        assert gradient.shard is not None
        _put(gradient.shard, values, accumulate, scale)

    def event(self, gradient: GradientBuffer) -> streams.Event | None:
        """None is sent."""

    def finish_sums(self) -> None:
        """Nothing is on its way."""

    def wait(self) -> None:
        """Nothing is on its way."""

    def close(self) -> None:
        """It holds nothing."""


def _put(grad: torch.Tensor, values: torch.Tensor, adds: bool, scale: float) -> None:
    """``grad = scale * values``, or ``+=``, in host memory; the kernels of the host know 32 bits
    and fewer.
    """
    if grad.dtype == torch.float64:
        grad.add_(values, alpha=scale) if adds else grad.copy_(values).mul_(scale)
    elif adds:
        host.accumulate(grad, values, scale)
    else:
        host.cast(grad, values, scale)
