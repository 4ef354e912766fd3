"""Gradients of column-wise weights, computed while the gradient of their shared input is summed
over the ranks.

[Note: beside the sum]
A linear layer's backward makes both gradients at once, and the sum would follow after the last of
the layers that share an input: no computation is left to overlap with it. So the layers multiply
with their weights as constants, and the autograd node of the shared input (``copy_to``), which runs
after them, has the weights as inputs: it launches the sum, computes the weights' gradients from the
gradients that arrived at each layer's output, and waits.

A node that holds a weight delays its gradient until it runs. So it holds weights of only one ZeRO
unit, whose reduction waits for all of them anyway. Compiled code orders its backward itself and
does not use this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hf_zero.zero.layout.parameter import owner_of


def is_conv1d(module: nn.Module) -> bool:
    """Whether ``module`` is transformers' Conv1D, a linear layer with a weight of [inputs,
    outputs].
    """
    return any(map(_is_conv1d, type(module).__mro__))


def _is_conv1d(kind: type) -> bool:
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def separable_weight(module: nn.Module, kind: type[nn.Module]) -> nn.Parameter | None:
    """Return the weight of ``module`` if the forward of its class ``kind`` is a plain product with
    it, else None.
    """
    plain = kind.forward is nn.Linear.forward or _is_conv1d(kind)
    return module._parameters.get("weight") if plain else None


class WeightGradients:
    """The gradients of ``weights``, by the number of their layer; these layers read one input."""

    def __init__(self, weights: Mapping[int, nn.Parameter]):
        self._places = {number: place for place, number in enumerate(weights)}
        self.weights: Sequence[nn.Parameter] = list(weights.values())
        self._conv1d: set[int] = set()
        self._arrived: dict[int, torch.Tensor] = {}

    def holds(self, number: int, module: nn.Module) -> bool:
        """Whether the gradient of ``module``, layer ``number``, is one of these."""
        place = self._places.get(number)
        return place is not None and module._parameters.get("weight") is self.weights[place]

    def product(self, number: int, module: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the output of ``module``, layer ``number``, for ``x``, without recording the
        gradient of its weight.
        """
        place, bias = self._places[number], module.bias
        weight = self.weights[place].detach()
        if is_conv1d(module):
            self._conv1d.add(place)
            y = torch.addmm(bias, x.view(-1, x.shape[-1]), weight)
            y = y.view(*x.shape[:-1], weight.shape[-1])
        else:
            y = F.linear(x, weight, bias)
        node = y.grad_fn
        assert node is not None
        node.register_prehook(partial(self._arrive, place))
        return y

    def _arrive(self, place: int, gradients: Sequence[torch.Tensor | None]) -> None:
        if gradients[0] is not None:
            self._arrived[place] = gradients[0]

    def compute(self, x: torch.Tensor) -> list[torch.Tensor | None]:
        """Return the gradients, from input ``x`` and the gradients that arrived; None: none did."""
        found: list[torch.Tensor | None] = []
        for place, weight in enumerate(self.weights):
            arrived = self._arrived.pop(place, None)
            if arrived is None:
                found.append(None)
                continue
            rows = arrived.reshape(-1, arrived.shape[-1])
            inputs = x.reshape(-1, x.shape[-1]).to(rows.dtype)
            first, second = (inputs, rows) if place in self._conv1d else (rows, inputs)
            found.append(first.t().mm(second).to(weight.dtype))
        return found


def of_one_unit(
    first: nn.Parameter, others: Mapping[int, nn.Parameter | None]
) -> WeightGradients | None:
    """Return the gradients of those of ``others`` that train and belong to the unit of ``first``;
    None if there is none.
    """
    unit = _unit(first)
    weights = {
        number: weight
        for number, weight in others.items()
        if weight is not None and weight.requires_grad and _unit(weight) is unit
    }
    return WeightGradients(weights) if weights else None


def _unit(parameter: nn.Parameter) -> Any:
    flat = owner_of(parameter)
    return None if flat is None else flat.unit
