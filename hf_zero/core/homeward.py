"""Gradients on their way from a GPU to the host memory that offloaded ones are kept in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_zero.core.flat import Flat
from hf_zero.core.states import Take
from hf_zero.device import streams
from hf_zero.ops import host

STAGED = 2  # gradients that are to be added to others, on their way at once
UNDER_WAY = 4  # gradients whose copy on the GPU is kept; the host waits for the oldest, so that it does not run ahead with all of them


@dataclass
class _Crossing:
    flat: Flat
    values: torch.Tensor  # on the GPU; kept until they have been copied
    arrived: streams.Event
    staged: torch.Tensor | None


class Homeward:
    """Copies on a stream of their own, beside the backward. ``take`` gives memory that a GPU can copy to."""

    def __init__(self, device: torch.device, take: Take):
        self._device = device
        self._take = take
        self._stream: streams.Stream | None = None
        self._crossings: list[_Crossing] = []
        self.last: Flat | None = None  # that was sent
        self._events: dict[Flat, streams.Event] = {}  # of each flat's last crossing
        self._staging: list[torch.Tensor] = []

    def send(self, flat: Flat, values: torch.Tensor, accumulate: bool) -> None:
        """``flat.grad = values``, or ``+=``; :meth:`arrive` tells when."""
        if self._stream is None:
            self._stream = streams.new_stream(self._device)
        assert flat.grad is not None
        target, staged = flat.grad, None
        if accumulate or flat.grad.dtype != values.dtype:
            staged = self._stage(values.nbytes)
            target = staged[: values.nbytes].view(values.dtype)
            if not accumulate:
                flat.grad.zero_()
        while len(self._crossings) >= UNDER_WAY:
            self._land()
        self._stream.wait_stream(streams.current_stream(self._device))
        with streams.on_stream(self._stream):
            target.copy_(values, non_blocking=True)
            self.last, self._events[flat] = flat, streams.record_event(self._stream)
            self._crossings.append(_Crossing(flat, values, self._events[flat], staged))

    @property
    def is_adding(self) -> bool:
        """Whether something is on its way that the host has to add."""
        return any(crossing.staged is not None for crossing in self._crossings)

    def event(self, flat: Flat) -> streams.Event | None:
        """What tells that the gradient of ``flat`` has been copied, if nothing has to be added to it."""
        return self._events.get(flat)

    def _stage(self, nbytes: int) -> torch.Tensor:
        while sum(crossing.staged is not None for crossing in self._crossings) >= STAGED:
            self._land()
        fitting = next((memory for memory in self._staging if memory.numel() >= nbytes), None)
        if fitting is None:
            return self._take(nbytes, torch.uint8)
        self._staging.remove(fitting)
        return fitting

    def _land(self) -> None:
        crossing = self._crossings.pop(0)
        crossing.arrived.synchronize()
        if crossing.staged is not None:
            assert crossing.flat.grad is not None
            host.accumulate(crossing.flat.grad, crossing.staged[: crossing.values.nbytes].view(crossing.values.dtype))
            self._staging.append(crossing.staged)

    def add_up(self) -> None:
        """Return when the host has added what it has to; copies may go on."""
        if self.is_adding:
            self.arrive()

    def arrive(self) -> None:
        """Return when all that was sent is there."""
        while self._crossings:
            self._land()
