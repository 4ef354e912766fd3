"""What a model consists of and what its classes declare.

Walks follow torch's order in a quarter of the time of torch's, which resume a generator for each
level of the model and compose names. Declarations are read from every submodule: whoever wraps a
model of transformers (a LightningModule, an actor of reinforcement learning) trains the same model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import nn

from hf_zero.config.feature_rows import FEATURES

T = TypeVar("T", bound=torch.Tensor)


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
    return _distinct([module._parameters for module in modules_of(model)])


def parameters_with(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> list[nn.Parameter]:
    """Return the parameters of ``model`` and of the groups of ``optimizer``, each once."""
    groups = [] if optimizer is None else optimizer.param_groups
    parameters = [*parameters_of(model), *[p for group in groups for p in group["params"]]]
    return list({id(parameter): parameter for parameter in parameters}.values())


def buffers_of(model: nn.Module) -> list[torch.Tensor]:
    """Return ``[*model.buffers()]``."""
    return _distinct([module._buffers for module in modules_of(model)])


def _distinct(tables: Iterable[Mapping[str, T | None]]) -> list[T]:
    """Return the tensors of ``tables`` by their first appearance."""
    return list({id(t): t for table in tables for t in table.values() if t is not None}.values())


# Packages that declare by properties, which read no parameter.
_DECLARING = frozenset(package for row in FEATURES.values() for package in row.declares)
_METHODS = (FunctionType, classmethod, staticmethod)


def attribute_of(module: nn.Module, name: str) -> Any:
    """Return attribute ``name`` of ``module``, None without one. Runs no code of a user's class: a
    property, or a ``__getattr__``, may read parameters that are released, or change buffers.
    """
    for values in (module.__dict__, module._parameters, module._buffers, module._modules):
        if name in values:
            return values[name]
    for base in type(module).__mro__:
        if name in base.__dict__:
            value = base.__dict__[name]
            computed = hasattr(value, "__get__") and not isinstance(value, _METHODS)
            runs = not computed or base.__module__.partition(".")[0] in _DECLARING
            return getattr(module, name, None) if runs else None
    outer = type(module).__getattr__.__module__  # a wrapper's looks into what it wraps
    inner = module._modules.get("base_model") or module._modules.get("model")
    if inner is None or outer.partition(".")[0] not in _DECLARING:
        return None
    return attribute_of(inner, name)


def declared(model: nn.Module, attribute: str) -> dict[str, tuple[str, ...]]:
    """Return the names in class attribute ``attribute`` (a list, set or dict of strings) of each
    submodule that has any, by the submodule's name; "" for ``model`` itself.
    """
    declarations = {}
    for prefix, module in named_modules_of(model):
        names = attribute_of(module, attribute)
        if isinstance(names, (list, tuple, set, frozenset, dict)) and names:
            declarations[prefix] = tuple(map(str, names))
    return declarations


def config_of(model: nn.Module | None) -> Any:
    """Return the ``config`` of ``model``, or of its outermost submodule with one of transformers;
    None without any.
    """
    modules = () if model is None else modules_of(model)
    configs = (attribute_of(module, "config") for module in modules)
    config = next((config for config in configs if hasattr(config, "model_type")), None)
    return attribute_of(model, "config") if config is None and model is not None else config


def text_config_of(model: nn.Module) -> object:
    """Return the part of :func:`config_of` that describes the text model; None without any."""
    config = config_of(model)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


class StagedModel(nn.Module):
    """A model of which each rank holds stages: its parameters differ from those of other ranks, and
    its plan is collective.
    """


def described(module: nn.Module) -> str:
    """Return the class of ``module``, for messages, with the release of the library that has it."""
    kind = getattr(type(module), "_hf_zero_plain", type(module))
    library = kind.__module__.partition(".")[0]
    release = getattr(sys.modules.get(library), "__version__", None)
    return f"{kind.__name__} of {library} {release}" if release else kind.__name__
