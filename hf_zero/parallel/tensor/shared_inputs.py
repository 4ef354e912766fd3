"""Inputs that sharded layers share: one copy of each, so that its gradient is summed over the ranks
once, and the gradients of the weights of its readers, computed while that sum is in flight.

[Note: beside the sum]
Layers that read the same input (queries, keys and values; gate and up) share one sum in the
backward. A linear layer's backward makes both gradients at once, and the sum would follow after the
last of the layers that share an input: no computation is left to overlap with it. So the layers
multiply with their weights as constants, and the autograd node of the shared input (``copy_to``),
which runs after them, has the weights as inputs: it launches the sum, computes the weights'
gradients from the gradients that arrived at each layer's output, and waits.

A node that holds a weight delays its gradient until it runs. So it holds weights of only one ZeRO
unit, whose reduction waits for all of them anyway. Compiled code orders its backward itself and
does not use this.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from hf_zero.parallel.tensor.axis import TensorAxis, copy_to
from hf_zero.zero.gather.unit import Unit, unit_of
from hf_zero.zero.layout.flat_buffer import owner_of


def is_conv1d(module: nn.Module) -> bool:
    """Return whether ``module`` is transformers' Conv1D: linear, with weight [inputs, outputs]."""
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
        self._places = {number: index for index, number in enumerate(weights)}
        self.weights: Sequence[nn.Parameter] = list(weights.values())
        self._conv1d: set[int] = set()
        self._arrived: dict[int, torch.Tensor] = {}

    def holds(self, number: int, module: nn.Module) -> bool:
        """Return whether the gradient of ``module``, layer ``number``, is one of these."""
        index = self._places.get(number)
        return index is not None and module._parameters.get("weight") is self.weights[index]

    def product(self, number: int, module: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the output of ``module``, layer ``number``, for ``x``, without recording the
        gradient of its weight.
        """
        index, bias = self._places[number], module.bias
        weight = self.weights[index].detach()
        if is_conv1d(module):
            self._conv1d.add(index)
            y = torch.addmm(bias, x.view(-1, x.shape[-1]), weight)
            y = y.view(*x.shape[:-1], weight.shape[-1])
        else:
            y = F.linear(x, weight, bias)
        node = y.grad_fn
        assert node is not None
        node.register_prehook(partial(self._arrive, index))
        return y

    def _arrive(self, index: int, gradients: Sequence[torch.Tensor | None]) -> None:
        if gradients[0] is not None:
            self._arrived[index] = gradients[0]

    def compute(self, x: torch.Tensor) -> list[torch.Tensor | None]:
        """Return the gradients, from input ``x`` and the gradients that arrived; None: none did."""
        grads: list[torch.Tensor | None] = []
        for index, weight in enumerate(self.weights):
            arrived = self._arrived.pop(index, None)
            if arrived is None:
                grads.append(None)
                continue
            rows = arrived.reshape(-1, arrived.shape[-1])
            inputs = x.reshape(-1, x.shape[-1]).to(rows.dtype)
            first, second = (inputs, rows) if index in self._conv1d else (rows, inputs)
            grads.append(first.t().mm(second).to(weight.dtype))
        return grads


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


def _unit(parameter: nn.Parameter) -> Unit | None:
    flat = owner_of(parameter)
    return None if flat is None else unit_of(flat)


def _no_layer() -> None:
    """Stand for the reference to a layer of a copy that has not run yet."""


class _Copy(NamedTuple):
    """A copy of ``original`` for cut layers; ``beside``: computed while its gradient is summed."""

    original: torch.Tensor
    copy: torch.Tensor
    beside: WeightGradients | None


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
        self._copies: list[_Copy] = []

    def __deepcopy__(self, memo: dict[int, object]) -> SharedInputs:
        copied = memo[id(self)] = SharedInputs(self.name)
        # Copies of layers make themselves known as they run: a copy may be of one layer alone.
        copied._members = [_no_layer] * len(self._members)
        return copied

    def join(self, layer: nn.Module) -> int:
        """Add ``layer``, which is held weakly; return its number."""
        self._members.append(weakref.ref(layer))
        return len(self._members) - 1

    def copy(
        self, x: torch.Tensor, layer: nn.Module, member: int, axis: TensorAxis
    ) -> tuple[torch.Tensor, WeightGradients | None]:
        """Return ``x`` for ``layer``, whose number is ``member``, copied once for all its readers,
        and the gradients of weights that are computed beside its sum. Notes that the layer has run.
        """
        if self._members[member]() is not layer:
            self._members[member] = weakref.ref(layer)
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x, None
        if member in self._ran:
            self._ran, self._copies = [], []
        copied = next((entry for entry in self._copies if entry.original is x), None)
        if copied is None:
            beside = self._beside(x, member, axis)
            copied = _Copy(x, copy_to(x, axis, self.name, beside), beside)
            self._copies.append(copied)
        self._ran.append(member)
        if len(self._ran) == len(self._members):
            self._ran, self._copies = [], []
        return copied.copy, copied.beside

    def _beside(self, x: torch.Tensor, member: int, axis: TensorAxis) -> WeightGradients | None:
        """Return the weight gradients of layer ``member`` and of later readers of ``x``."""
        if axis.is_rehearsed or torch.compiler.is_compiling() or not x.is_contiguous():
            return None
        weights = {}
        for number, reference in enumerate(self._members):
            layer = reference()
            if number not in self._ran and layer is not None:
                weights[number] = getattr(layer, "separable_weight", None)
        weight = weights[member]
        return None if weight is None else of_one_unit(weight, weights)
