"""Conversion of optimizers of torch and transformers whose update needs whole tensors into classes
of this package that make the same update over shards.

The object keeps its identity, groups, hooks and schedulers, and remains an instance of its own
class.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from hf_zero.optim.adafactor import Adafactor, TorchAdafactor
from hf_zero.optim.muon import Muon
from hf_zero.optim.whole_tensor import WholeTensorOptimizer

# keyed by module and name: transformers may not be installed
OURS: dict[str, type[WholeTensorOptimizer]] = {
    "torch.optim.Muon": Muon,
    "torch.optim.Adafactor": TorchAdafactor,
    "transformers.optimization.Adafactor": Adafactor,
}
_made: dict[Any, type[WholeTensorOptimizer]] = {}
_UPDATE_METHODS = ("step", "_init_group", "_get_lr", "_rms", "_approx_sq_grad", "_get_options")


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def adopted_class(cls: Any) -> type[WholeTensorOptimizer] | None:
    """Return the subclass of ``cls`` that makes its update over shards, or None if ``cls`` is
    unknown or overrides the update.
    """
    known = next((base for base in cls.__mro__ if _name(base) in OURS), None)
    if known is None or issubclass(cls, WholeTensorOptimizer):
        return None
    for name in _UPDATE_METHODS:
        own, its = getattr(cls, name, None), getattr(known, name, None)
        if own is not its and inspect.unwrap(own or _none) is not inspect.unwrap(its or _none):
            return None
    if cls in _made:
        return _made[cls]
    ours = OURS[_name(known)]
    made = _made[cls] = type(
        cls.__name__, (ours, cls), {"__module__": cls.__module__, "ADOPTED": cls}
    )
    made.__qualname__ = cls.__qualname__
    return made


def adopt(optimizer: torch.optim.Optimizer) -> None:
    """Convert ``optimizer`` in place to its sharded class if :func:`adopted_class` finds one. Its
    groups get the settings that the original class does not have.
    """
    found, live = adopted_class(type(optimizer)), vars(optimizer)
    if found is None:
        return
    if getattr(live.get("step"), "_wrapped_by_lr_sched", False):
        del live["step"]  # a scheduler's wrapper around the step of the former class
    optimizer.__class__ = found
    patch: Any = optimizer
    patch._patch_step_function()
    for group in optimizer.param_groups:
        for name, value in found.ADOPTED_SETTINGS.items():
            group.setdefault(name, value)
    for state in optimizer.state.values():
        found.adopt_state(state)


def give_back(optimizer: torch.optim.Optimizer) -> None:
    """Undo :func:`adopt`. The optimizer's state must have been removed before."""
    former = getattr(type(optimizer), "ADOPTED", None)
    if former is not None:
        optimizer.__class__ = former


def _none() -> None:
    """A placeholder for a method that a class does not define."""
