"""Gradients on their way from a GPU to the host memory that offloaded ones are kept in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_zero.core.flat import Flat
from hf_zero.device import streams
from hf_zero.ops import host
from hf_zero.spans import span
from hf_zero.storage.states import Take

STAGED = 2  # gradients that are to be added to others, on their way at once
# gradients whose copy on the GPU is kept; the host waits for the oldest, so that it does not run
# ahead with all of them
UNDER_WAY = 4


@dataclass(eq=False)
class _Crossing:
    flat: Flat
    values: torch.Tensor  # on the GPU; kept until they have been copied
    arrived: streams.Event
    staged: torch.Tensor | None
    adds: bool  # what was staged is added; else it is cast into the place of what was there
    scale: float  # by which it is multiplied there


class Homeward:
    """Copies on a stream of their own, beside the backward.

    ``take`` gives memory that a GPU can copy to.
    """

    def __init__(self, device: torch.device, take: Take):
        self._device = device
        self._take = take
        self._stream: streams.Stream | None = None
        self._crossings: list[_Crossing] = []
        self.last: Flat | None = None  # that was sent
        self._events: dict[Flat, streams.Event] = {}  # of each flat's last crossing
        self._staging: list[torch.Tensor] = []

    def send(self, flat: Flat, values: torch.Tensor, accumulate: bool, scale: float = 1.0) -> None:
        """``flat.grad = scale * values``, or ``+=``; :meth:`arrive` tells when.

        ``scale`` is 1 where the dtypes are one and nothing is added.
        """
        if self._stream is None:
            self._stream = streams.new_stream(self._device)
        assert flat.grad is not None
        target, staged = flat.grad, None
        if accumulate or flat.grad.dtype != values.dtype:
            staged = self._stage(values.nbytes)
            target = staged[: values.nbytes].view(values.dtype)
        while len(self._crossings) >= UNDER_WAY:
            self._land()
        self._stream.wait_stream(streams.current_stream(self._device))
        with streams.on_stream(self._stream), span("copy_to_host", flat.key, values.nbytes):
            target.copy_(values, non_blocking=True)
            self.last, self._events[flat] = flat, streams.record_event(self._stream)
            self._crossings.append(
                _Crossing(flat, values, self._events[flat], staged, accumulate, scale)
            )

    @property
    def is_adding(self) -> bool:
        """Whether something is on its way that the host has to add or to cast."""
        return any(crossing.staged is not None for crossing in self._crossings)

    def event(self, flat: Flat) -> streams.Event | None:
        """What tells that the gradient of ``flat`` has been copied, if nothing has to be added
        to it.
        """
        return self._events.get(flat)

    def _stage(self, nbytes: int) -> torch.Tensor:
        while sum(crossing.staged is not None for crossing in self._crossings) >= STAGED:
            self._land()
        fitting = next(
            (place for place, memory in enumerate(self._staging) if memory.numel() >= nbytes), None
        )
        if fitting is not None:
            return self._staging.pop(fitting)
        if self._staging:
            self._staging.pop()  # a larger one takes its place
        return self._take(nbytes, torch.uint8)

    def _land(self) -> None:
        crossing = self._crossings.pop(0)
        crossing.arrived.synchronize()
        if crossing.staged is not None:
            assert crossing.flat.grad is not None
            values = crossing.staged[: crossing.values.nbytes].view(crossing.values.dtype)
            _put(crossing.flat.grad, values, crossing.adds, crossing.scale)
            self._staging.append(crossing.staged)

    def add_up(self) -> None:
        """Return when the host has added what it has to; copies may go on."""
        if self.is_adding:
            self.arrive()

    def arrive(self) -> None:
        """Return when all that was sent is there."""
        while self._crossings:
            self._land()

    def close(self) -> None:
        """Let go of everything: no gradient that was sent is wanted any more."""
        if self._stream is not None:
            self._stream.synchronize()
        self._crossings, self._staging, self._events, self.last = [], [], {}, None


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
