"""Marks of modules that are to be gathered whole, as one unit (``wrap.py``): DeepSpeed's functions,
and the section ``leaf_module`` of a configuration.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from types import UnionType
from typing import Any

from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.logging import JsonObject, log_rank0
from hf_zero.zero.layout.walk import attribute_of, modules_of, named_modules_of
from hf_zero.zero.layout.wrap import WHOLE


def _checked_entries(given: object, kinds: type | UnionType, wanted: str) -> list[Any]:
    """Return ``given``, one entry or several, as a list. Raises ConfigError unless all are of
    ``kinds``, which ``wanted`` describes.
    """
    several = isinstance(given, Iterable) and not isinstance(given, kinds)
    entries = list(given) if several else [given]  # type: ignore[call-overload]
    for entry in entries:
        if not isinstance(entry, kinds):
            raise ConfigError(f"{entry!r:.80} names no modules to mark; pass {wanted}")
    return entries


def _mark_classes(
    model: nn.Module, leaf_classes: object, value: bool, raise_if_not_found: bool
) -> tuple[list[nn.Module], list[type | str]]:
    """Set the mark of the modules of ``leaf_classes`` to ``value``. Return them, and the classes of
    which there are none.
    """
    classes = _checked_entries(leaf_classes, type | str, "classes, or names of classes")
    by_class = {kind: [m for m in model.modules() if _is_a(m, kind)] for kind in classes}
    marked = set().union(*by_class.values())
    if raise_if_not_found and not marked:
        names = sorted(kind if isinstance(kind, str) else kind.__qualname__ for kind in classes)
        raise ConfigError(
            f"no module of {type(model).__name__} is one of {names}; name classes of "
            "modules inside the model"
        )
    for module in marked:
        setattr(module, WHOLE, value)
    missing = [kind for kind, modules in by_class.items() if not modules]
    return [module for module in model.modules() if module in marked], missing


def _is_a(module: nn.Module, kind: type | str) -> bool:
    """Return whether ``module`` is of the class ``kind``, or of one so named: by its own name,
    nested in another, or with its module.
    """
    if isinstance(kind, type) and isinstance(module, kind):
        return True
    own = type(module)
    names = (own.__name__, own.__qualname__, f"{own.__module__}.{own.__qualname__}")
    return (kind if isinstance(kind, str) else kind.__qualname__) in names


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark and return the modules of these classes (or of classes with these names, with their
    module or without), before ``initialize``. Raises ConfigError for what is neither, and with
    ``raise_if_not_found`` if there is no such module.

    A block of a model is one unit in any case, so the mark changes nothing for modules inside
    blocks. A marked module that holds blocks, or is outside them, becomes a unit: its experts are
    gathered together instead of one by one.
    """
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)[0]


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the mark and return the modules."""
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)[0]


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
    Raises ConfigError for what is no name, and for missing names if ``raise_if_not_found``.
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
    patterns = _checked_entries(patterns, str, "names of modules")
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
    marked, no_classes = _mark_classes(model, classes, True, False)
    by_name, no_names = set_z3_leaf_modules_by_name(model, names, True, False)
    by_suffix, no_suffixes = set_z3_leaf_modules_by_suffix(model, suffixes, True, False)
    marked = list(dict.fromkeys([*marked, *by_name, *by_suffix]))
    missing = [*no_names, *no_suffixes, *no_classes]
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
