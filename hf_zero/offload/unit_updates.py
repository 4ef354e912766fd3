"""Updates of units that begin before the step ends them, in a backward or beside the training. The
step calls this interface; without a feature all state is on the device, where a step updates it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from hf_zero.device import streams
    from hf_zero.zero.gather.unit import Unit
    from hf_zero.zero.layout.gradients import GradientBuffer


class UnitUpdates:
    """The updates of one engine: one that a backward has begun on the device."""

    takes_offloaded = False
    """Whether it updates state that is not on the device."""

    def __init__(self) -> None:
        self.units: list[Unit] = []  # with offloaded state
        # update begun in the backward under way, before its step, and the units it has updated
        self.backward_update: Any = None
        self.units_updated_in_backward: list[Unit] = []

    @property
    def pending(self) -> tuple[Unit, ...]:
        """Units whose update has begun and not been waited for."""
        return ()

    def find_units(self) -> None:
        """Find the units that have offloaded flat buffers now."""

    def used(self, unit: Unit) -> None:
        """Record that a pass or a script needs ``unit`` now, and wait for its update."""
        unit.wait_for_update()

    def start(self, update: Any) -> None:
        """Begin the rest of ``update``, one step of the bound optimizer."""
        self.backward_update, self.units_updated_in_backward = None, []

    def start_in_backward(self, update: Any, unit: Unit) -> None:
        """Begin ``update`` with the offloaded state of ``unit``, whose gradients are complete while
        the backward continues. :meth:`start` updates the rest.
        """
        self.begin_in_backward(update)
        self.units_updated_in_backward.append(unit)

    def begin_in_backward(self, update: Any) -> None:
        """Begin ``update`` in a backward, unless it has begun; :meth:`start` ends it."""
        if self.backward_update is not update:
            self.finish()
            self.backward_update, self.units_updated_in_backward = update, []

    def end_backward(self) -> None:
        """Note that the backward has issued all its reductions: a rank that needs updated values
        may have them.
        """

    def drop_backward_update(self) -> None:
        """Drop the rest of an update begun in a backward: all state is about to be overwritten."""
        self.finish()
        self.backward_update, self.units_updated_in_backward = None, []

    def finish(self, unit: Unit | None = None) -> None:
        """Wait for the update of ``unit``, or of all units, and raise its exception."""

    def close(self) -> BaseException | None:
        """Wait for all updates, free what they use, and return the first exception, if any."""
        return None


class GradientCopies(Protocol):
    """Copies of reduced gradients from the device to host memory."""

    @property
    def is_adding(self) -> bool:
        """Return whether the host adds or casts a copy under way."""

    def send(
        self, gradient: GradientBuffer, values: torch.Tensor, accumulate: bool, scale: float = 1.0
    ) -> None:
        """Begin ``gradient.shard = scale * values``, or ``+=``; done when :meth:`wait` returns."""

    def event(self, gradient: GradientBuffer) -> streams.Event | None:
        """Return the end of the last copy of ``gradient``, None if none was sent."""

    def finish_sums(self) -> None:
        """Wait for the host's additions; plain copies may continue."""

    def wait(self) -> None:
        """Wait for everything that was sent."""

    def close(self) -> None:
        """Free everything and drop the gradients that were sent."""
