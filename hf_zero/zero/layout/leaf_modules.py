"""Marks of modules that are to be gathered whole, as one unit (``wrap.py``): DeepSpeed's functions,
and the section ``leaf_module`` of a configuration.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.logging import JsonObject, log_rank0
from hf_zero.zero.layout.walk import attribute_of, modules_of, named_modules_of
from hf_zero.zero.layout.wrap import WHOLE


def _mark_classes(
    model: nn.Module, leaf_classes: Iterable[type | str], value: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    """Set the mark of the modules of ``leaf_classes`` to ``value``, and return them."""
    classes = list(leaf_classes)
    names = {item if isinstance(item, str) else item.__qualname__ for item in classes}
    types = tuple(item for item in classes if isinstance(item, type))
    marked = [
        module
        for module in model.modules()
        if isinstance(module, types) or names & _names_of(type(module))
    ]
    if raise_if_not_found and not marked:
        raise ConfigError(
            f"no module of {type(model).__name__} is one of {sorted(names)}; name classes of "
            "modules inside the model"
        )
    for module in marked:
        setattr(module, WHOLE, value)
    return marked


def _names_of(kind: type) -> set[str]:
    """Return the accepted names of a class: its own, nested in another, with its module."""
    return {kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}"}


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark and return the modules of these classes (or of classes with these names, with their
    module or without), before ``initialize``.

    A block of a model is one unit in any case, so the mark changes nothing for modules inside
    blocks. A marked module that holds blocks, or is outside them, becomes a unit: its experts are
    gathered together instead of one by one.
    """
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the mark and return the modules."""
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Set or remove the mark of one module."""
    setattr(model, WHOLE, flag)


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules with these names in ``named_modules``. Return (modules, missing names).
    Raises ConfigError for missing names if ``raise_if_not_found``.
    """
    return _mark_named(model, module_names, flag, raise_if_not_found, str.__eq__)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark by name suffix; else like :func:`set_z3_leaf_modules_by_name`."""
    return _mark_named(model, module_name_suffixes, flag, raise_if_not_found, str.endswith)


def _mark_named(
    model: nn.Module,
    patterns: Sequence[str],
    flag: bool,
    raise_if_not_found: bool,
    matches: Callable[[str, str], bool],
) -> tuple[list[nn.Module], list[str]]:
    """Set the mark of the modules whose name ``matches`` one of ``patterns`` to ``flag``. Return
    them, and the patterns that match none.
    """
    named = named_modules_of(model)
    matching = {key: [module for name, module in named if matches(name, key)] for key in patterns}
    missing = [pattern for pattern, modules in matching.items() if not modules]
    if missing and raise_if_not_found:
        raise ConfigError(
            f"{type(model).__name__} has no module named {missing}; model.named_modules() lists "
            "what it has"
        )
    modules = list(dict.fromkeys(module for matched in matching.values() for module in matched))
    for module in modules:
        setattr(module, WHOLE, flag)
    return modules, missing


def mark_configured(
    model: nn.Module, section: JsonObject | None, warns: bool = True
) -> list[nn.Module]:
    """Mark the modules that the section ``zero_optimization.leaf_module`` lists: ``classes``,
    ``names`` and ``name_suffixes``. ``warns``: of entries that are not in the model.
    """
    if not section:
        return []
    classes, names, suffixes = (
        section.get(key) or [] for key in ("classes", "names", "name_suffixes")
    )
    marked = _mark_classes(model, classes, True, False)
    by_name, no_names = set_z3_leaf_modules_by_name(model, names, True, False)
    by_suffix, no_suffixes = set_z3_leaf_modules_by_suffix(model, suffixes, True, False)
    marked = list(dict.fromkeys([*marked, *by_name, *by_suffix]))
    missing = [*no_names, *no_suffixes, *(() if marked else classes)]
    if missing and warns:
        log_rank0(
            f"zero_optimization.leaf_module names {missing}, which the model does not have",
            logging.WARNING,
        )
    return marked


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in modules_of(model) if z3_leaf_module(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    return bool(attribute_of(model, WHOLE))
