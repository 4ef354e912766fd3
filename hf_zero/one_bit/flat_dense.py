"""The momentum of one flat buffer whose tensors are too small for blocks of bits, while ranks make
local steps: as in flat_momentum.py, but with C(z) = z in fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_zero.one_bit.flat_momentum import AVERAGE, LIMIT, FlatMomentum
from hf_zero.ops.sign_blocks_reference import powers


class FlatDense(FlatMomentum):
    """A :class:`FlatMomentum` without compression; ``momentum`` and the messages are fp32 [ranks,
    chunk], and errors stay zero.
    """

    def renew(self) -> tuple[Tensor, Tensor]:
        layout = self.flat.layout
        if self.momentum is None:
            self.momentum = torch.empty(
                layout.shards, layout.chunk, dtype=torch.float32, device=self.flat.full.device
            )
        return self.momentum.view(-1), self.state(AVERAGE).clone()

    def compress(self, gradient: Tensor, beta: float, factor: Tensor) -> Tensor:
        return torch.add(self.values() * beta, gradient * factor).view(self.flat.layout.shards, -1)

    def combine(self, came: Tensor, beta: float) -> Tensor:
        average = self.state(AVERAGE)
        torch.sum(came, 0, out=average)
        return average.div_(came.shape[0]).clone()

    def apply(
        self, made: int, settings: Callable[[int], tuple[float, float]], limit: float = LIMIT
    ) -> None:
        assert self.weights is not None and self.exponents is not None
        values = self.values()
        for index, start, stop in self.runs:
            keep, size = settings(index)
            update = values[start:stop] * powers(self.exponents[start:stop])
            self.weights[start:stop].mul_(keep).sub_(update, alpha=size)

    def values(self) -> Tensor:
        assert self.momentum is not None
        return self.momentum.view(-1)
