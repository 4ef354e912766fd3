"""Walks over a model in torch's order, in a quarter of the time of torch's, which resume a
generator for each level of the model and compose names.
"""

from __future__ import annotations

import torch
from torch import nn


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return ``[*model.modules()]``."""
    if not model._modules:
        return [model]
    seen: dict[int, nn.Module] = {}
    pending = [model]
    while pending:
        module = pending.pop()
        if id(module) not in seen:
            seen[id(module)] = module
            if module._modules:
                pending += [c for c in reversed(module._modules.values()) if c is not None]
    return [*seen.values()]


def named_modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return ``[*model.named_modules()]``."""
    names: dict[nn.Module, str] = {}
    pending = [("", model)]
    while pending:
        name, module = pending.pop()
        if module not in names:
            names[module] = name
            if module._modules:
                prefix = f"{name}." if name else ""
                children = reversed(module._modules.items())
                pending += [(prefix + key, child) for key, child in children if child is not None]
    return [(name, module) for module, name in names.items()]


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """Return ``[*model.parameters()]``."""
    parameters: dict[int, nn.Parameter] = {}
    for module in modules_of(model):
        for parameter in module._parameters.values():
            if parameter is not None:
                parameters[id(parameter)] = parameter
    return [*parameters.values()]


def buffers_of(model: nn.Module) -> list[torch.Tensor]:
    """Return ``[*model.buffers()]``."""
    buffers: dict[int, torch.Tensor] = {}
    for module in modules_of(model):
        for buffer in module._buffers.values():
            if buffer is not None:
                buffers[id(buffer)] = buffer
    return [*buffers.values()]
