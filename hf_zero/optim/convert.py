"""Optimizers of torch and transformers whose update needs whole tensors: an object of such a class
becomes one of the class here that makes the same update over shards.

The object stays the same one, with its groups, its hooks and the schedulers that hold it, and
remains an instance of its own class.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from hf_zero.optim.adafactor import Adafactor, TorchAdafactor
from hf_zero.optim.muon import Muon
from hf_zero.optim.whole_tensor import WholeTensorOptimizer

# by module and name: transformers may not be installed
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
    """The class that makes the update of ``cls`` over shards and is a subclass of it, or None:
    ``cls`` is not known, or has an update of its own.
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
    """Make ``optimizer`` one that steps shards, where its class is known here; its groups get the
    settings that its own class does not have.
    """
    found, live = adopted_class(type(optimizer)), vars(optimizer)
    if found is None:
        return
    if getattr(live.get("step"), "_wrapped_by_lr_sched", False):
        del live["step"]  # a scheduler's note of the call around the step of the former class
    optimizer.__class__ = found
    patch: Any = optimizer
    patch._patch_step_function()
    for group in optimizer.param_groups:
        for name, value in found.ADOPTED_SETTINGS.items():
            group.setdefault(name, value)
    for state in optimizer.state.values():
        found.adopt_state(state)


def give_back(optimizer: torch.optim.Optimizer) -> None:
    """Undo :func:`adopt`, once the optimizer has no state."""
    former = getattr(type(optimizer), "ADOPTED", None)
    if former is not None:
        optimizer.__class__ = former


def _none() -> None:
    """Stands for a method that a class does not have."""
