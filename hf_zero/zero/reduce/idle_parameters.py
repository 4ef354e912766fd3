"""Parameters that all ranks leave out of every backward of a window, and know it: their units, or
the layers in them, are dropped from every forward that these backwards reach.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hf_zero.zero.gather.unit import Unit
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.gradients import GradState


class IdleParameters:
    """Parameters that all ranks leave out of every backward of a window, and know it: a bit for
    each member of a flat buffer.
    """

    def __init__(self) -> None:
        self._of_backward: Mapping[FlatBuffer, int] | None = None
        self._of_window: Mapping[FlatBuffer, int] | None = None

    def add_forward(self, idle: Mapping[FlatBuffer, int]) -> None:
        """Record that the backward under way reaches a forward without the parameters ``idle``."""
        before = self._of_backward
        self._of_backward = idle if before is None else _both(before, idle)

    def end_backward(self) -> None:
        """Record the backward: one that reaches no forward uses all parameters."""
        before, idle = self._of_window, self._of_backward or {}
        self._of_window = idle if before is None else _both(before, idle)
        self._of_backward = None

    def set_on_flats(self) -> None:
        """Set the flat buffers' idle parameters, once the gradients of the window are reduced."""
        for flat, bits in (self._of_window or {}).items():
            flat.gradient.set_idle(bits)

    def clear(self) -> None:
        """Begin another window."""
        self._of_backward = self._of_window = None


def _both(
    one: Mapping[FlatBuffer, int], other: Mapping[FlatBuffer, int]
) -> Mapping[FlatBuffer, int]:
    if one is other:
        return other
    return {flat: bits & other[flat] for flat, bits in one.items() if flat in other}


def mark_idle(flats: Sequence[FlatBuffer]) -> None:
    """Mark the idle parameters of ``flats`` as unused."""
    for gradient in (flat.gradient for flat in flats):
        if gradient.idle and not gradient.all_unused:
            gradient.set_unused(gradient.names_of(gradient.idle))


def zero_left_out(units: Sequence[Unit]) -> None:
    """Set the gradient to zero, once the window is reduced, for flat buffers that all ranks have
    left out of every backward.
    """
    flats = [flat for unit in units for flat in unit.trainable_flats]
    empty = [flat for flat in flats if flat.gradient.state is GradState.EMPTY]
    if empty and any(flat.gradient.holds_gradient for flat in flats):
        for flat in empty:
            flat.gradient.leave_out()
