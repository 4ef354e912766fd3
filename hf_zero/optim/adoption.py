"""Objects of classes of torch, transformers, bitsandbytes and torchao, converted to classes of this
package that make the same update over shards: an object keeps its identity, groups, hooks and
schedulers, and remains an instance of its own class.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch

from hf_zero.config.feature_rows import loaded
from hf_zero.config.optimizers import OPTIMIZERS
from hf_zero.optim.segments import ParamState

_ADOPTING = {name: row for row in OPTIMIZERS for name in row.adopts}


_adopted_classes: dict[Any, Any] = {}  # by the class before


_CONVERTED_METHODS = ("step", "_init_group", "_get_lr", "_rms", "_approx_sq_grad", "_get_options")


def qualified_name(cls: type) -> str:
    """Return the name of ``cls`` with its module."""
    return f"{cls.__module__}.{cls.__qualname__}"


def overrides(cls: type, base: type, methods: Iterable[str]) -> bool:
    """Return whether ``cls`` replaces one of the ``methods`` of ``base``. torch wraps the inherited
    ``step`` of every subclass for its profiler, so the unwrapped functions are compared.
    """
    return any(
        inspect.unwrap(getattr(cls, name, _absent))
        is not inspect.unwrap(getattr(base, name, _absent))
        for name in methods
    )


def _absent() -> None:
    """A placeholder for a method that a class does not define."""


def adopted_class(cls: Any) -> Any:
    """Return the subclass of ``cls`` that makes its update over shards, or None if ``cls`` is
    unknown or overrides the update.
    """
    listed = next((base for base in cls.__mro__ if qualified_name(base) in _ADOPTING), None)
    if listed is None:
        return None
    ours = loaded(_ADOPTING[qualified_name(listed)].cls)
    if issubclass(cls, ours):
        return None
    if overrides(cls, listed, _CONVERTED_METHODS):
        return None
    if cls in _adopted_classes:
        return _adopted_classes[cls]
    subclass = _adopted_classes[cls] = type(
        cls.__name__, (ours, cls), {"__module__": cls.__module__, "ADOPTED": cls}
    )
    subclass.__qualname__ = cls.__qualname__
    return subclass


def adopt(optimizer: torch.optim.Optimizer) -> None:
    """Convert ``optimizer`` in place to its sharded class if :func:`adopted_class` finds one. Its
    groups get the settings that the original class does not have.
    """
    adopted, live = adopted_class(type(optimizer)), vars(optimizer)
    if adopted is None:
        return
    adopted.adopt_groups(optimizer)
    if getattr(live.get("step"), "_wrapped_by_lr_sched", False):
        del live["step"]  # a scheduler's wrapper around the step of the former class
    optimizer.__class__ = adopted
    patch: torch.optim.Optimizer = optimizer
    patch._patch_step_function()
    adopt_states(optimizer, optimizer.state.values())


def adopt_states(optimizer: torch.optim.Optimizer, states: Iterable[ParamState]) -> None:
    """Convert ``states`` of parameters in place, from the format of the class that ``optimizer``
    had before :func:`adopt`.
    """
    adopt_state = getattr(type(optimizer), "adopt_state", lambda state: None)
    for state in states:
        adopt_state(state)


def give_back(optimizer: torch.optim.Optimizer) -> None:
    """Undo :func:`adopt`. The optimizer's state must have been removed before."""
    former = getattr(type(optimizer), "ADOPTED", None)
    if former is not None:
        optimizer.__class__ = former
