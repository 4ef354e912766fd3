"""Walks over a model, in the order of torch's and in a quarter of the time: those are generators, as
deep as the model, that compose names.
"""

from __future__ import annotations

from torch import nn


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return ``[*model.modules()]``."""
    seen: dict[int, nn.Module] = {}
    pending = [model]
    while pending:
        module = pending.pop()
        if id(module) not in seen:
            seen[id(module)] = module
            if module._modules:
                pending += [c for c in reversed(module._modules.values()) if c is not None]
    return [*seen.values()]


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """Return ``[*model.parameters()]``."""
    parameters: dict[int, nn.Parameter] = {}
    for module in modules_of(model):
        for parameter in module._parameters.values():
            if parameter is not None:
                parameters[id(parameter)] = parameter
    return [*parameters.values()]
