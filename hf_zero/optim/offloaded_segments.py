"""Segments whose state is not on the device, as a step, loads and checkpoints see them. A feature
provides the state and its updates; without one all state is on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hf_zero.optim.segment_entries import SegmentStateAccess
from hf_zero.optim.segments import Regions, Segment, StateArrays

if TYPE_CHECKING:
    from hf_zero.zero.layout.optimizer_shard import OptimizerShard


UsedSegments = Callable[["OptimizerShard"], Sequence[Segment]]
"""The segments of a flat buffer, whose state is offloaded, without those of unused parameters."""
StepSubGroup = Callable[[Segment, StateArrays, Tensor, float, bool], None]
"""Update a segment by the optimizer itself, over arrays, with a gradient, its divisor, and whether
the step is the first.
"""


class OffloadedSegments(Regions):
    """The segments of one optimizer whose state is offloaded; in this class there are none.

    ``moments``: the configured storage format. ``base``: the optimizer's class among those with a
    known update.
    """

    def __init__(self, entries: SegmentStateAccess, base: type | None, moments: str) -> None:
        super().__init__()

    def cut(self, flats: Sequence[OptimizerShard], group_of: Mapping[str, int]) -> None:
        """Cut ``flats``, whose state is offloaded, into regions."""

    def offloaded_update(
        self,
        used_segments: UsedSegments,
        step_sub_group: StepSubGroup,
        divisor: float,
        steps_before: int,
    ) -> Any:
        """Return the update of all state in one step, with the group settings of this moment, and
        gradients divided by ``divisor``; ``steps_before``: number of earlier steps.
        """
        return object()

    def create_all(self) -> None:
        """Create the state of every segment, see :meth:`create`."""

    def reset_all(self) -> None:
        """Reset all segments to before the first step; entries must have been removed."""

    @staticmethod
    def view(segment: Segment, name: str) -> Any:
        """Return the entry of state ``name`` of ``segment``."""

    def create(self, segment: Segment) -> None:
        """Create the entries of ``segment`` before its first step, if it has none, and arrays that
        do not exist yet.
        """

    def reset(self, segment: Segment) -> None:
        """Reset ``segment`` as if it had never been stepped."""

    def put(self, segment: Segment, name: str, at: int, values: Tensor) -> None:
        """Write ``values`` into state ``name`` of ``segment``, starting at element ``at``."""

    def create_missing(self, flat: OptimizerShard) -> bool:
        """Create the missing state of ``flat``, with its values before a first step; return whether
        all of its segments already had state with such values.
        """
        return False

    def arrays(self, flat: OptimizerShard) -> Mapping[str, Tensor]:
        """Return the master weights and each per-element state of ``flat``, 1-D over
        ``flat.owned``, that holds values; they may be copies.
        """
        return {}

    def load_tensor(self, flat: OptimizerShard, name: str, tensor: Tensor, first: int) -> None:
        """Copy ``tensor`` (1-D) into a state of ``flat``, from element ``first`` on."""

    def copies(self, flat: OptimizerShard) -> dict[str, Tensor]:
        """Return copies of the per-element states of ``flat``."""
        return {}
