"""State of whole tensors (the factors of Adafactor's second moment), replicated: every segment of a
tensor, on every rank that has a part of it, keeps all factors with equal values.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hf_zero.optim import state
from hf_zero.optim.device_state import StateEntries
from hf_zero.optim.segment_table import SegmentTable
from hf_zero.optim.sharded_tensors import extent_of
from hf_zero.optim.table import Segment
from hf_zero.optim.whole_tensor import FACTORS, WholeTensorOptimizer

# by parameter and state name
Factors = Mapping[str, Mapping[str, Tensor]]


class TensorFactors:
    """The factors of the parameters of one optimizer."""

    def __init__(self, entries: StateEntries, table: SegmentTable) -> None:
        self._entries = entries
        self._table = table
        optimizer = entries.optimizer
        # possible names of factors
        self.known = optimizer.FACTOR_NAMES if isinstance(optimizer, WholeTensorOptimizer) else ()

    def of(self, segment: Segment) -> dict[str, Tensor]:
        """Return the factors of ``segment``, which must have been stepped or be stepped now."""
        if not self.known:
            return {}
        live = self._entries.optimizer.state[segment.tensor]
        factors: dict[str, Tensor] = live.setdefault(FACTORS, {})
        return factors

    def held(self, firsts: bool = False) -> dict[str, dict[str, Tensor]]:
        """Return factors by parameter; ``firsts``: only if this rank has its first element."""
        found = {}
        for segment in self._table.segments if self.known else ():
            start, stop = extent_of(segment) if segment.parts else (0, 0)
            if start < stop and not (firsts and start):
                factors = self._entries.of(segment).get(FACTORS)
                if factors:
                    found[min(segment.names)] = factors
        return found

    def load(self, saved: Factors) -> None:
        """Load the result of :meth:`held`, which may have parameters of any rank; factors of all
        others are reset.
        """
        for segment in self._table.segments if self.known else ():
            entries = self._entries.of(segment)
            if segment.parts and entries:
                factors = state.copied(saved.get(min(segment.names), {}))
                entry = self._entries.optimizer.state[segment.tensor]
                entry[FACTORS] = {
                    name: each.to(segment.tensor.device, segment.tensor.dtype)
                    for name, each in factors.items()
                }

    @property
    def names(self) -> list[str]:
        """The parameters with elements on this rank that may have factors."""
        return sorted(
            {
                min(segment.names)
                for segment in (self._table.segments if self.known else ())
                if segment.parts
            }
        )
