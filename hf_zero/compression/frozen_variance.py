"""The variance that steps with momenta in one bit keep frozen: the step that it belongs to, which
checkpoints have in the groups of the optimizer, and its change before a dense step or a save.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_zero.compression.flat_momentum import FlatMomentum, corrects
from hf_zero.compression.rank_norm import note
from hf_zero.distributed.mesh import Mesh
from hf_zero.optim.bound_optimizer import BoundOptimizer
from hf_zero.optim.group_settings import ALL_FROZEN_AT, FROZEN_AT
from hf_zero.optim.one_bit import OneBit


class FrozenVariance:
    """The variance of the momenta of one engine. ``made``: the number of steps made so far."""

    def __init__(self, mesh: Mesh, bound: BoundOptimizer, one_bit: OneBit) -> None:
        self._mesh, self._bound, self._one_bit = mesh, bound, one_bit

    @property
    def at(self) -> int:
        """The step that the variance belongs to."""
        return int(self._bound.groups[0][FROZEN_AT])

    @property
    def was_frozen(self) -> bool:
        """Return whether it has been frozen before, in this run or in the one that was loaded."""
        return self._bound.groups[0].get(FROZEN_AT) is not None

    @property
    def rescales(self) -> bool:
        """Return whether a save between steps in one bit notes its own step, to which it has
        rescaled the variance. Without bias correction it stays the variance of the step that froze
        it.
        """
        return self._one_bit.renews or corrects(self._bound.groups[0])

    def serves_after(self, made: int) -> bool:
        """Return whether the frozen variance serves the next step, after a load."""
        is_dense = self._one_bit.is_dense
        if not self.was_frozen or is_dense(made):
            return False
        at = self.at
        return at == made or (not self.rescales and at < made and not is_dense(at + 1))

    def covers_all_at(self, made: int) -> bool:
        """Return whether that of momenta which are never sent is frozen at ``made``, too."""
        return self._bound.groups[0].get(ALL_FROZEN_AT) == made

    def note(self, made: int, of_all: bool) -> None:
        """Record that the variance is that of the last step made, also of momenta that are never
        sent if it is ``of_all``.
        """
        note(self._bound, FROZEN_AT, made)
        if of_all:
            note(self._bound, ALL_FROZEN_AT, made)

    def lags(self, made: int) -> dict[str, int]:
        """Return by how many steps parameters lag behind, because they were unused in these."""
        return {
            name: made - int((numbers or {}).get("step", 0))
            for name, numbers in self._bound.state.scalars.of_parameters().items()
        }

    def sums(self, momenta: Sequence[FlatMomentum], denominators: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums of all ranks (collective)."""
        sums = [momentum.sums(local) for momentum, local in zip(momenta, denominators)]
        total = torch.cat(sums, 1)
        self._mesh.shard.all_reduce(total, "squares of denominators").wait()
        return list(total.split([part.shape[1] for part in sums], 1))

    def freeze(self, momenta: Sequence[FlatMomentum], made: int) -> None:
        """Freeze the variances of ``momenta``, and raise tiny ones (collective)."""
        lags = self.lags(made)
        denominators = [momentum.denominators(made, lags) for momentum in momenta]
        sums = self.sums(momenta, denominators)
        total = torch.cat(sums, 1).sum(1)
        usual = (total[0] / total[1].clamp(min=1.0)).sqrt()
        for momentum, local, of_all_ranks in zip(momenta, denominators, sums):
            momentum.raise_variance(local, of_all_ranks, usual, made, lags)
            momentum.freeze()

    def rescale(self, momenta: Sequence[FlatMomentum], made: int, of_all: bool) -> None:
        """Rescale the variances to the last step made, before a dense step or a save."""
        if not self.rescales:
            return
        lags, at = self.lags(made), self.at
        for momentum in momenta:
            momentum.count_variance(at, made, lags)
        self.note(made, of_all)
