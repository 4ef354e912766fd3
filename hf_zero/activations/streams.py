"""Copies between device and host memory: asynchronous on a side stream, or synchronous if the
device is the host.

[Note: one stream]
All copies of a :class:`Streams` run on one stream, in the order of their calls, so a reused host
region cannot be overwritten before an earlier copy has read it. Before each copy the side stream
waits for the compute stream (which has launched the kernels that produce the values, or that used
the memory before). The compute stream waits for a copy, on the device, only before its result is
used or its source is released. The host never waits.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from hf_zero.device import streams


class Brought(Protocol):
    """A copy to the device, under way or complete."""

    def use(self) -> torch.Tensor:
        """Return the values, uint8 on the device, for kernels launched from now on in the current
        stream.
        """
        ...


class Transfers(Protocol):
    """Copies between device and host memory."""

    def send(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        """Copy ``source`` (uint8 on the device) to ``target`` in host memory; return a handle for
        :meth:`leave`, until which ``source`` must stay alive.
        """
        ...

    def leave(self, sent: Any) -> None:
        """Let the current stream reuse the source of the copy ``sent`` from now on."""
        ...

    def bring(self, source: torch.Tensor) -> Brought:
        """Start to copy ``source``, in host memory, to the device."""
        ...

    def close(self) -> None:
        """Wait until no copy is under way."""
        ...


class Streams:
    """Asynchronous copies of a GPU. See the note."""

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
        # Allocated on the compute stream: once freed, the memory is reused by later work of that
        # stream.
        values = torch.empty(source.numel(), dtype=torch.uint8, device=self._device)
        self._stream.wait_stream(current)
        with streams.on_stream(self._stream):
            values.copy_(source, non_blocking=True)
            return _OnStream(values, streams.record_event(self._stream), current)

    def close(self) -> None:
        self._stream.synchronize()


class _OnStream:
    """``values`` allocated on stream ``home``; the event ``came`` marks the end of their copy."""

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
        # freed memory returns to its stream, which must not write to it before the copy has
        if not self._used:
            self._home.wait_event(self._came)


class Plain:
    """Synchronous copies, for a device that is the host."""

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)

    def leave(self, sent: None) -> None:
        """No-op: copies are synchronous."""

    def bring(self, source: torch.Tensor) -> _There:
        return _There(source.clone())

    def close(self) -> None:
        """No-op: copies are synchronous."""


class _There:
    def __init__(self, values: torch.Tensor):
        self._values = values

    def use(self) -> torch.Tensor:
        return self._values
