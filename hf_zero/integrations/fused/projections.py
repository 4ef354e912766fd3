"""One matrix product for linear layers that a module calls with one input: q, k and v; gate and up.

Which layers these are is read from a training forward of the model without values
(:func:`.shells.calls_of_model`), so neither names nor code matter. The first layer of a group that
is called computes the outputs of all; the others take theirs if they are called with the same
tensor, and compute it themselves otherwise.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from hf_zero.integrations.fused.shells import ModuleCall
from hf_zero.integrations.fused.sublayers import plain, takes, whole
from hf_zero.ops.dispatch import version_of

GROUP = "_hf_zero_group"
State = tuple[object, ...]
# an input, its state, and by number of a layer its output and the state of its weights
Held = tuple[torch.Tensor | None, State, dict[int, tuple[torch.Tensor, State]]]
NOTHING: Held = (None, (), {})


class Projections:
    """Linear layers of one input, and outputs that have not been asked for yet."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        self.linears = linears
        self.held = NOTHING

    def __deepcopy__(self, memo: dict[int, object]) -> Projections:
        new = Projections([])
        memo[id(self)] = new
        new.linears = [copy.deepcopy(linear, memo) for linear in self.linears]
        return new

    def output(self, linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        number = next(i for i, layer in enumerate(self.linears) if layer is linear)
        # read once, because another thread may call the same layers
        now, (source, then, outputs) = _state(x), self.held
        if source is x and then == now and number in outputs:
            out, computed_with = outputs.pop(number)
            if not outputs:
                self.held = NOTHING
            if computed_with == _state(linear.weight, linear.bias):
                return out
        self.held = NOTHING
        together = whole(x, self.linears) if takes(x, linear.weight) else None
        if together is None:
            return F.linear(x, linear.weight, linear.bias)
        # no views, which a wrapper of one layer might not write into
        sizes = [layer.weight.shape[0] for layer in self.linears]
        parts = torch.unsafe_split_with_sizes(together, sizes, -1)
        outputs = {
            i: (part, _state(layer.weight, layer.bias))
            for i, (part, layer) in enumerate(zip(parts, self.linears, strict=True))
            if i != number
        }
        self.held = x, now, outputs
        return parts[number]


def _state(*tensors: torch.Tensor | None) -> State:
    """Return what changes if one of ``tensors`` is replaced or written to, or the grad mode."""
    if torch.compiler.is_compiling():
        return (torch.is_grad_enabled(),)
    known = [(id(tensor), version_of(tensor)) for tensor in tensors if tensor is not None]
    return (torch.is_grad_enabled(), *known)


def _project(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    return self.__dict__[GROUP].output(self, input)  # type: ignore[no-any-return]


def install(linears: list[nn.Linear]) -> None:
    group = Projections(linears)
    for linear in linears:
        linear.__dict__[GROUP] = group
        linear.forward = types.MethodType(_project, linear)  # type: ignore[method-assign]


def remove(linears: list[nn.Linear]) -> None:
    for linear in linears:
        linear.__dict__.pop(GROUP, None)
        linear.__dict__.pop("forward", None)


def groups(calls: list[ModuleCall], model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield (name of the parent, names of linear layers below it) for each group of plain linear
    layers that are called with one tensor, once each, and whose outputs are not written into.
    """
    linears = {
        name: module
        for name, module in model.named_modules()
        if plain(module, nn.Linear) and "forward" not in module.__dict__
    }
    count: dict[str, int] = {}
    together: dict[tuple[str, int], list[str]] = {}
    for call in calls:
        if call.name in linears and len(call.inputs) == 1:
            written = call.outputs[0]._version != call.version
            count[call.name] = count.get(call.name, 0) + 1 + written
            parent = call.name.rpartition(".")[0]
            together.setdefault((parent, id(call.inputs[0])), []).append(call.name)
    for (parent, _), names in together.items():
        if len(names) > 1 and all(count[name] == 1 for name in names):
            yield parent, names
