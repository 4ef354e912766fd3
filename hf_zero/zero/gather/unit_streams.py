"""The streams of a device on which a unit is gathered, read, and given gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_zero.device import kinds, streams
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.parameter_views import raw_grads


class UnitStreams:
    """The streams of ``device`` that use one unit, whose flat buffers with gradients are
    ``trainable``. On the host, and for a unit that is neither gathered nor trained, ``device`` is
    None: nothing has to be called then.
    """

    def __init__(
        self, device: torch.device, sharded: Sequence[FlatBuffer], trainable: Sequence[FlatBuffer]
    ):
        self._trainable = list(trainable)
        is_used = bool(sharded or trainable) and not kinds.is_synchronous(device)
        self.device = device if is_used else None
        # of forwards, which read the values and on which gradients accumulate
        self.computing: set[streams.Stream] = set()
        self._gathered_on: streams.Stream | None = None  # that has waited for the last gather

    def record_compute(self) -> None:
        """Register the current stream as one on which a forward, or its backward, runs: it waits
        for the gather, and the values are not released under it.
        """
        assert self.device is not None
        current = streams.current_stream(self.device)
        self.computing.add(current)
        if self._gathered_on is not None and current != self._gathered_on:
            current.wait_stream(self._gathered_on)

    def record_gather(self) -> None:
        """Record that the current stream has waited for the last gather: others wait for it."""
        if self.device is not None:
            self._gathered_on = streams.current_stream(self.device)

    def record_release(self, values: torch.Tensor) -> None:
        """Keep the memory of ``values``, which is freed next, until the work of these streams."""
        assert self.device is not None
        for stream in {*self.computing, streams.current_stream(self.device)}:
            streams.record_use(values, stream)

    def wait_for_gradients(self) -> None:
        """Make the current stream wait for gradients that a backward has accumulated.

        Autograd accumulates on the stream of the forward, and orders it before the caller's stream
        only at the end of the backward.
        """
        assert self.device is not None
        current = streams.current_stream(self.device)
        if streams.wait_for(self.computing, current):
            # their memory is given back while the current stream reads it
            members = (member for flat in self._trainable for member in flat.members)
            for grad in raw_grads(members):
                if grad is not None and grad.device == self.device:
                    streams.record_use(grad, current)

    def forget(self) -> None:
        """Forget the streams: the device has completed their work, or its graph orders them."""
        self.computing.clear()
        self._gathered_on = None
        for flat in self._trainable:
            if flat.gradient.memory is not None:
                flat.gradient.memory.forget_stream()
