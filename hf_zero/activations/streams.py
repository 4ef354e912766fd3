"""Copies between the device and host memory that overlap what the device computes; and plain ones
where that is the host itself.

[Note: one stream]
All copies of a :class:`Streams` run on one stream, in the order of their calls. So a host region
that is used again cannot be written before the copy from it has run: that was called earlier. The
computing stream is waited for before each copy (what it has launched makes the values, or has used
the memory before), and waits itself, on the device, only where a copy's result is used or its
source is given back. The host waits for nothing.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from hf_zero.device import streams


class Brought(Protocol):
    """A copy on its way to the device."""

    def use(self) -> torch.Tensor:
        """The values, uint8 on the device, for what is launched from now on in the current
        stream.
        """
        ...


class Transfers(Protocol):
    """How bytes leave the device and come back."""

    def send(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        """Copy ``source`` (uint8 on the device) to ``target`` in host memory; what :meth:`leave`
        takes. ``source`` must live until then.
        """
        ...

    def leave(self, sent: Any) -> None:
        """From now on the current stream may use the memory of what was sent for something else."""
        ...

    def bring(self, source: torch.Tensor) -> Brought:
        """Begin to copy ``source``, in host memory, to the device."""
        ...

    def close(self) -> None:
        """Return when no copy is under way."""
        ...


class Streams:
    """On a GPU. See the note."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = streams.side_stream(device, streams.Use.ACTIVATIONS)

    def send(self, source: torch.Tensor, target: torch.Tensor) -> streams.Event:
        self._stream.wait_stream(streams.current_stream(self._device))
        with streams.on_stream(self._stream):
            target.copy_(source, non_blocking=True)
            return streams.record_event(self._stream)

    def leave(self, sent: streams.Event) -> None:
        if not sent.query():
            streams.current_stream(self._device).wait_event(sent)

    def bring(self, source: torch.Tensor) -> _OnStream:
        current = streams.current_stream(self._device)
        # From the computing stream's memory: given back, it is used next by what that stream
        # launches later.
        values = torch.empty(source.numel(), dtype=torch.uint8, device=self._device)
        self._stream.wait_stream(current)
        with streams.on_stream(self._stream):
            values.copy_(source, non_blocking=True)
            return _OnStream(values, streams.record_event(self._stream), current)

    def close(self) -> None:
        self._stream.synchronize()


class _OnStream:
    """``values`` belong to the memory of stream ``home``; ``came`` tells that they are there."""

    __slots__ = ("_came", "_home", "_used", "_values")

    def __init__(self, values: torch.Tensor, came: streams.Event, home: streams.Stream):
        self._values, self._came, self._home = values, came, home
        self._used = False

    def use(self) -> torch.Tensor:
        current = streams.current_stream(self._values.device)
        current.wait_event(self._came)
        if current == self._home:
            self._used = True
        else:
            self._values.record_stream(current)
        return self._values

    def __del__(self) -> None:
        # the memory goes back to its stream, which must not write before the copy has
        if not self._used:
            self._home.wait_event(self._came)


class Plain:
    """Where the device is the host: copies that are over when their call is."""

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)

    def leave(self, sent: None) -> None:
        """Nothing is under way."""

    def bring(self, source: torch.Tensor) -> _There:
        return _There(source.clone())

    def close(self) -> None:
        """Nothing is under way."""


class _There:
    def __init__(self, values: torch.Tensor):
        self._values = values

    def use(self) -> torch.Tensor:
        return self._values
