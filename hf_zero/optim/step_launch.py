"""A launch over all segments in place of an optimizer's own step, as the core sees it: none, unless
a row of features provides kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_zero.config.feature_rows import provided
from hf_zero.optim.device_state import DeviceState
from hf_zero.optim.segments import Segment


class StepLaunch:
    """The launches of an optimizer, whose class updates as ``base``, over its segments in
    ``device``; ``kernels`` are those of the configuration.
    """

    ready = False
    """Whether a launch may take the place of the optimizer's step at all."""

    def __init__(
        self, device: DeviceState, base: type | None, kernels: str | tuple[str, ...]
    ) -> None:
        pass

    @staticmethod
    def reads_16_bits(
        optimizer: torch.optim.Optimizer, kernels: str | tuple[str, ...], device: torch.device
    ) -> bool:
        """Return whether the update of ``optimizer`` on ``device`` is a launch that reads 16-bit
        gradients directly.
        """
        return False

    def reset(self, device: torch.device | None) -> None:
        """Forget places and counters, because segments have been cut anew. ``device``: the device
        of the segments that are stepped; None: there are none.
        """

    def divide(self, by_segment: bool = True) -> None:
        """Count steps per segment from now on: segments are split, with their state, or have made
        different numbers of steps. Otherwise, count them per group as long as they are equal.
        """

    def separate_counters(self) -> None:
        """Give each tensor its own step counter: the optimizer's step increments them in turn."""

    def takes(self, segments: Sequence[Segment]) -> bool:
        """Return whether the next step over ``segments`` is a launch. If not, the optimizer's own
        step can make it.
        """
        return False

    def repeats(self, segments: Sequence[Segment]) -> bool:
        """Return whether a launch over all of ``segments`` can be replayed from a graph."""
        return False

    def prepare(self, segments: Sequence[Segment], shards: Mapping[str, Tensor]) -> list[Tensor]:
        """Write the settings of the next step over ``segments`` to the device; return the tensors
        outside the graph that a captured launch of this step reads or writes.
        """
        return []

    def step(
        self,
        segments: Sequence[Segment],
        stepped: Sequence[Segment],
        grad_scale: Tensor | None,
        shards: Mapping[str, Tensor],
        hooks: bool,
    ) -> set[str]:
        """Update ``stepped``, some or all of ``segments`` that the launch :meth:`takes`, with the
        optimizer's ``hooks`` around it.

        Return the keys of the flat buffers among ``shards`` whose new values were written there.
        """
        return set()


def step_launch() -> type[StepLaunch]:
    """Return the class that a row of features provides."""
    kind: type[StepLaunch] = provided("step_launch", StepLaunch)
    return kind
