"""The gradient norm of steps with momenta in one bit.

No rank has the average gradient then before its momentum is sent, and clipping must precede that.
The norm is estimated as the root mean square of the ranks' own gradient norms times the ratio
of the two, measured in the last dense steps. A step that sends nothing uses this rank's own
gradient and that ratio. The ratio stays on the device, in the groups of the optimizer; a checkpoint
stores it as a number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_zero.distributed.mesh import Mesh
from hf_zero.optim.bound_optimizer import BoundOptimizer
from hf_zero.optim.group_settings import NORM_RATIO
from hf_zero.zero.reduce.norm import sums_of_squares


class RankNorm:
    """The sum of squares of this rank's own gradients, if taken in this step."""

    def __init__(self, mesh: Mesh, bound: BoundOptimizer, kernels: str | tuple[str, ...]) -> None:
        self._mesh, self._bound, self._kernels = mesh, bound, kernels
        self._squares: Tensor | None = None
        self.scale = 1.0  # factor that makes the gradients summands of a mean

    def take(self, gradients: Sequence[Tensor], scale: float) -> None:
        self._squares, self.scale = self._sum(gradients) * scale**2, scale

    def drop(self) -> None:
        self._squares = None

    def estimated(self, share: float) -> Tensor:
        """Return ``share`` of the estimated square of the average gradient's norm: fp64, 0-dim."""
        if self._squares is None:
            return torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        ratio = self._ratio()
        return self._squares * (torch.where(ratio < 0.0, 1.0, ratio) * share)

    def measure(self, shards: Sequence[Tensor]) -> None:
        """Update the ratio by the average gradient: this rank has ``shards`` (collective)."""
        if self._squares is None:
            return
        both = torch.stack([self._sum(shards), self._squares])
        self._squares = None
        self._mesh.shard.all_reduce(both, "norms of gradients").wait()
        mean, local = both.unbind()
        ratio, before = mean * self._mesh.shard.size / local, self._ratio()
        mixed = torch.where(before < 0.0, ratio, 0.9 * before + 0.1 * ratio)
        measured = (ratio >= 0.0) & (ratio < float("inf"))  # excludes zero gradients and overflows
        note(self._bound, NORM_RATIO, torch.where(measured, mixed, before))

    def _ratio(self) -> Tensor:
        """Return the ratio measured so far, fp64, 0-dim; -1: none."""
        ratio = self._bound.groups[0].get(NORM_RATIO, -1.0)
        if isinstance(ratio, Tensor):
            return ratio
        return torch.full((), ratio, dtype=torch.float64, device=self._mesh.device)

    def _sum(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the sum of squares of ``tensors`` on the device, fp64."""
        return torch.stack(sums_of_squares(tensors, self._kernels)).sum().to(self._mesh.device)


def note(bound: BoundOptimizer, key: str, value: float | Tensor) -> None:
    """Store ``value`` in all groups of the optimizer ``bound``, and so in checkpoints."""
    for group in bound.groups:
        group[key] = value
