"""Layers that read the same input share one sum in the backward: queries, keys and values; gate and
up.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_zero.parallel.tensor.axis import TensorAxis, copy_to
from hf_zero.parallel.tensor.weight_gradients import WeightGradients, of_one_unit


def _unknown() -> None:
    """Stand for a reference to a layer that has not run yet."""


class SharedInputs:
    """Inputs shared by the sharded layers of one module: each is copied to them once, so that its
    gradient is summed over the ranks once, overlapped with the gradients of their weights.

    A copy is kept until every layer has run, or one of them runs again (a new forward: an
    exception, or a recomputation that stops early, has interrupted the previous one).
    """

    def __init__(self, name: str):
        self.name = name
        self._members: list[Callable[[], nn.Module | None]] = []
        self._ran: list[int] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor, WeightGradients | None]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedInputs:
        copied = memo[id(self)] = SharedInputs(self.name)
        # Copies of layers make themselves known as they run: a copy may be of one layer alone.
        copied._members = [_unknown] * len(self._members)
        return copied

    def join(self, layer: nn.Module) -> int:
        """The number of one more ``layer``."""
        self._members.append(weakref.ref(layer))
        return len(self._members) - 1

    def copy(
        self, x: torch.Tensor, layer: nn.Module, member: int, axis: TensorAxis
    ) -> tuple[torch.Tensor, WeightGradients | None]:
        """Return ``x`` for ``layer``, whose number is ``member``, and the gradients of weights
        that its sum is computed beside.
        """
        if self._members[member]() is not layer:
            self._members[member] = weakref.ref(layer)
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x, None
        if member in self._ran:
            self._ran, self._copies = [], []
        made = next((each[1:] for each in self._copies if each[0] is x), None)
        if made is None:
            beside = self._beside(x, member, axis)
            made = copy_to(x, axis, self.name, beside), beside
            self._copies.append((x, *made))
        self._ran.append(member)
        if len(self._ran) == len(self._members):
            self._ran, self._copies = [], []
        return made

    def _beside(self, x: torch.Tensor, member: int, axis: TensorAxis) -> WeightGradients | None:
        """Return the weight gradients of layer ``member`` and of later readers of ``x``."""
        if axis.is_rehearsed or torch.compiler.is_compiling() or not x.is_contiguous():
            return None
        weights = {}
        for number, each in enumerate(self._members):
            layer = each()
            if number not in self._ran and layer is not None:
                weights[number] = getattr(layer, "separable_weight", None)
        own = weights[member]
        return None if own is None else of_one_unit(own, weights)
