"""``set_z3_leaf_modules`` and related functions: marks on modules to be gathered as one unit, such
as a mixture of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.logging import log_rank0
from hf_zero.zero.layout.wrap import WHOLE


def _mark(
    model: nn.Module, leaf_classes: Iterable[type | str], value: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    wanted = list(leaf_classes)
    names = {item if isinstance(item, str) else item.__qualname__ for item in wanted}
    types = tuple(item for item in wanted if isinstance(item, type))
    found = [
        module
        for module in model.modules()
        if isinstance(module, types) or names & _names_of(type(module))
    ]
    if raise_if_not_found and not found:
        raise ConfigError(
            f"no module of {type(model).__name__} is one of {sorted(names)}; name classes of "
            "modules inside the model"
        )
    for module in found:
        setattr(module, WHOLE, value)
    return found


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
    return _mark(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the mark and return the modules."""
    return _mark(model, leaf_module_classes, False, raise_if_not_found)


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
    return _by(model, module_names, flag, raise_if_not_found, str.__eq__)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark by name suffix; else like :func:`set_z3_leaf_modules_by_name`."""
    return _by(model, module_name_suffixes, flag, raise_if_not_found, str.endswith)


def _by(
    model: nn.Module,
    given: Sequence[str],
    flag: bool,
    raise_if_not_found: bool,
    matches: Callable[[str, str], bool],
) -> tuple[list[nn.Module], list[str]]:
    named = list(model.named_modules())
    found = {each: [module for name, module in named if matches(name, each)] for each in given}
    missing = [each for each, modules in found.items() if not modules]
    if missing and raise_if_not_found:
        raise ConfigError(
            f"{type(model).__name__} has no module named {missing}; model.named_modules() lists "
            "what it has"
        )
    modules = list(dict.fromkeys(module for each in found.values() for module in each))
    for module in modules:
        setattr(module, WHOLE, flag)
    return modules, missing


def mark_configured(model: nn.Module, section: Mapping[str, Any] | None) -> list[nn.Module]:
    """Mark the modules that the section ``zero_optimization.leaf_module`` lists: ``classes``,
    ``names`` and ``name_suffixes``. Warns of entries that are not in the model.
    """
    if not section:
        return []
    classes, names, suffixes = (
        section.get(key) or [] for key in ("classes", "names", "name_suffixes")
    )
    found = _mark(model, classes, True, False)
    by_name, no_names = set_z3_leaf_modules_by_name(model, names, True, False)
    by_suffix, no_suffixes = set_z3_leaf_modules_by_suffix(model, suffixes, True, False)
    found = list(dict.fromkeys([*found, *by_name, *by_suffix]))
    missing = [*no_names, *no_suffixes, *(() if found else classes)]
    if missing:
        log_rank0(
            f"zero_optimization.leaf_module names {missing}, which the model does not have", 30
        )
    return found


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(module: nn.Module) -> bool:
    return bool(getattr(module, WHOLE, False))
