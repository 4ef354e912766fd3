"""``set_z3_leaf_modules`` and related functions: modules to be gathered as one unit, such as a
mixture of experts.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from hf_zero.core.wrap import WHOLE
from hf_zero.errors import ConfigError


def _mark(
    model: nn.Module, leaf_classes: Iterable[type | str], value: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    wanted = list(leaf_classes)
    names = {item if isinstance(item, str) else item.__qualname__ for item in wanted}
    types = tuple(item for item in wanted if isinstance(item, type))
    found = [
        module
        for module in model.modules()
        if isinstance(module, types) or type(module).__qualname__ in names
    ]
    if raise_if_not_found and not found:
        raise ConfigError(
            f"no module of {type(model).__name__} is one of {sorted(names)}; name classes of "
            "modules inside the model"
        )
    for module in found:
        setattr(module, WHOLE, value)
    return found


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes, before ``initialize``, and return them.

    A block of a model is gathered at once whatever runs inside it, so the mark changes nothing for
    modules inside blocks. One that holds blocks, or lies outside them, becomes a unit: experts that
    would be gathered one by one come together.
    """
    return _mark(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the mark away and return the modules."""
    return _mark(model, leaf_module_classes, False, raise_if_not_found)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(module: nn.Module) -> bool:
    return bool(getattr(module, WHOLE, False))
