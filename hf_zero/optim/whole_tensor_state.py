"""State of whole tensors, such as the factors of Adafactor's second moment. It is replicated: every
segment of a tensor, on every rank that has a part of it, keeps all of it with equal values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from hf_zero.optim.members import ShownState
from hf_zero.optim.segment_table import SegmentTable
from hf_zero.optim.segments import Segment

TensorsByParameter = Mapping[str, Mapping[str, Tensor]]
"""Tensors by parameter and by name of state."""


class WholeTensorState:
    """The state of whole tensors of one optimizer, as Adafactor's factors and LAMB's ratios."""

    def __init__(self, table: SegmentTable, shown: ShownState) -> None:
        self._entries, self._shown = table.entries, shown

    def _segments(self) -> Iterator[tuple[str, Segment]]:
        """Yield the parameters with elements on this rank that may have such state, each with the
        segments that are parts of it; none if the optimizer keeps no such state.
        """
        for segment in self._shown.segments if self._entries.of_wholes else ():
            if segment.parts:
                yield min(segment.names), segment

    @property
    def names(self) -> list[str]:
        """The parameters with elements on this rank that may have state of whole tensors."""
        return sorted({parameter for parameter, _ in self._segments()})

    def by_parameter(self, firsts: bool = False) -> dict[str, dict[str, Tensor]]:
        """Return the state by parameter; ``firsts``: only if this rank has its first element."""
        by_name = {}
        for parameter, segment in self._segments():
            start, stop = segment.extent
            if start < stop and not (firsts and start):
                entries = self._entries.of(segment)
                if state := {n: entries[n] for n in self._entries.of_wholes if n in entries}:
                    by_name[parameter] = state
        return by_name

    def load(self, saved: TensorsByParameter) -> None:
        """Load the result of :meth:`by_parameter`, which may have parameters of any rank and
        tensors of any device; remove the state of whole tensors of all others.
        """
        for parameter, segment in self._segments():
            if self._entries.of(segment):
                live, like = self._entries.states[segment.tensor], segment.tensor
                for name in self._entries.of_wholes:
                    live.pop(name, None)
                for name, tensor in saved.get(parameter, {}).items():
                    live[name] = tensor.to(like.device, like.dtype, copy=True)

    def put(self, name: str, values: Mapping[str, Tensor | None]) -> None:
        """Set the state ``name`` of the parameters in ``values`` to copies, on their own devices,
        or remove it where that is None.
        """
        for parameter, segment in self._segments():
            if parameter in values and self._entries.of(segment):
                live, value = self._entries.states[segment.tensor], values[parameter]
                if value is None:
                    live.pop(name, None)
                else:
                    live[name] = value.clone()
