"""Optimizers whose step has two halves, with sums over whole tensors between them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_zero.optim.segments import ParamGroup
from hf_zero.optim.whole_tensor import Parts, WholeTensorOptimizer


class TensorSumOptimizer(WholeTensorOptimizer):
    """An optimizer whose step has two halves, with sums over whole tensors between them."""

    SUMS: int
    """Number of sums of the first half for each tensor."""

    @staticmethod
    @abstractmethod
    def measure(group: ParamGroup, parts: Parts) -> Tensor:
        """Run the first half of a step of ``group``: update its moments and return the sums [parts,
        SUMS], in 64 bits, that are added up over whole tensors.
        """

    @classmethod
    def prepare(cls, group: ParamGroup, parts: Parts, at: int) -> Sequence[Tensor]:
        return list(cls.measure(group, parts))

    def combine(
        self,
        at: int,
        groups: Sequence[ParamGroup],
        parts: Sequence[Sequence[Tensor]],
        prepared: Sequence[Sequence[Tensor]],
    ) -> Sequence[Sequence[Tensor]]:
        rows = [row for of in prepared for row in of]
        sums = torch.zeros(0, self.SUMS, dtype=torch.float64)
        if rows:
            sums = torch.stack([row.to(rows[0].device) for row in rows])
        totals, by_group = self.tensors.totals(parts, sums)
        self.norms = [total.sqrt() for total in by_group]
        norms = totals.sqrt().split([len(of) for of in parts])
        return [norm.to(of[0].device) if of else norm for norm, of in zip(norms, parts)]
