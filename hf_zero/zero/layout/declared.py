"""Declarations of a model class, read from every submodule: whoever wraps a model of transformers
(a LightningModule, an actor of reinforcement learning) trains the same model.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch import nn

from hf_zero.config.feature_rows import FEATURES
from hf_zero.zero.layout.walk import modules_of, named_modules_of

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
