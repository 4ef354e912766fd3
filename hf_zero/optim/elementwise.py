"""The list of optimizers that may run on flat shards: those with an element-wise update, and those
that combine whole-tensor numbers in rounds (``whole_tensor.py``).

A shard cuts parameters anywhere, so an update may use the element, its gradient, its own state and
numbers of the group, but nothing computed over a whole tensor (a norm, a row mean, a matrix
product), unless it declares the sums that ranks add up for it. The list is exact: a class not on it
runs only if the user vouches for it by name, because a wrong one would train badly in silence.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch

from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.optim.adafactor import Adafactor
from hf_zero.optim.adam import Adam
from hf_zero.optim.convert import adopted_class
from hf_zero.optim.cpu import CPUSGD, CPUAdagrad, CPUAdam, CPULion
from hf_zero.optim.lamb import Lamb
from hf_zero.optim.lars import LARS
from hf_zero.optim.lion import Lion
from hf_zero.optim.muon import Muon
from hf_zero.optim.whole_tensor import WholeTensorOptimizer, whole_tensor_base

ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
    Adam,
    Lion,
    CPUAdam,
    CPULion,
    CPUAdagrad,
    CPUSGD,
)

# Classes whose update needs sums over whole tensors, which ranks add up, or whole matrices.
WHOLE_TENSOR: tuple[type[WholeTensorOptimizer], ...] = (Adafactor, Lamb, LARS, Muon)

# The reason why a class needs whole tensors; keyed by name, because most of these are in libraries
# that may not be installed.
_WHOLE_TENSOR = {
    "LBFGS": "it takes dot products over all parameters and calls a closure several times a step",
    "SparseAdam": "it needs sparse gradients, and shards hold dense ones",
    "Lamb": "it scales each update by the norm of the whole parameter, as hf_zero.optim.Lamb",
    "FusedLamb": "it scales each update by the norm of the whole parameter, as hf_zero.optim.Lamb",
    "LARS": "it scales each update by the norm of the whole parameter, as hf_zero.optim.LARS",
    "Shampoo": "it preconditions with factors of each whole matrix",
    "SOAP": "it preconditions with factors of each whole matrix",
    "GaLoreAdamW": "it projects the gradient of each whole matrix",
}
_UPDATE_METHODS = ("step", "_init_group", "update")


def elementwise_base(cls: type) -> type[torch.optim.Optimizer] | None:
    """Return the listed class whose update ``cls`` runs unchanged, or None.

    ``cls`` may be a listed class or a subclass of one that overrides none of ``step``,
    ``_init_group`` and ``update``: new defaults in ``__init__`` are fine, a new update is not.
    """
    listed = next((ancestor for ancestor in cls.__mro__ if ancestor in ELEMENTWISE), None)
    if listed is None:
        return None
    for name in _UPDATE_METHODS:
        # torch wraps the inherited ``step`` of every subclass for its profiler: compare the
        # unwrapped functions.
        if inspect.unwrap(getattr(cls, name, _nothing)) is not inspect.unwrap(
            getattr(listed, name, _nothing)
        ):
            return None
    return listed


def update_base(cls: type) -> type[torch.optim.Optimizer] | None:
    """Return the class with the update of ``cls`` unchanged, if flat shards can run it, or None."""
    return elementwise_base(cls) or whole_tensor_base(cls)


def _nothing() -> None:
    """A placeholder for a method that a class does not define."""


def vouched_for(cls: type, allowed: Iterable[str]) -> bool:
    """Whether the user named ``cls``, as ``"Name"`` or ``"package.module.Name"``."""
    return any(name in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}") for name in allowed)


def check(optimizer: Any, allowed: Iterable[str] = ()) -> None:
    """Raise unless ``optimizer`` can run on flat shards.

    Args:
        optimizer: the user's optimizer object.
        allowed: class names the user vouches for (the configuration's ``elementwise_optimizers``).

    Raises:
        UnsupportedOptimizerError: its class is neither on the list nor named in ``allowed``, or it
            is no ``torch.optim.Optimizer`` at all.
    """
    cls = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedOptimizerError(
            f"{cls.__module__}.{cls.__qualname__} is not a torch.optim.Optimizer; pass the "
            "optimizer itself, not a wrapper of it"
        )
    if update_base(adopted_class(cls) or cls) is not None or vouched_for(cls, allowed):
        return
    listed = next((base for base in cls.__mro__ if base in ELEMENTWISE), None)
    reason = next(
        (_WHOLE_TENSOR[base.__name__] for base in cls.__mro__ if base.__name__ in _WHOLE_TENSOR),
        None,
    )
    if reason is not None:
        why = f"its update needs whole-tensor numbers: {reason}, which is wrong on a shard"
    elif listed is not None:
        why = (
            f"it replaces the update of torch.optim.{listed.__name__} by its own, which hf-zero "
            "cannot know to be element-wise"
        )
    else:
        why = (
            "hf-zero does not know whether its update needs whole-tensor numbers (norms, row "
            "means), which are wrong on a shard"
        )
    names = ", ".join(sorted({base.__name__ for base in (*ELEMENTWISE, *WHOLE_TENSOR)}))
    raise UnsupportedOptimizerError(
        f"optimizer {cls.__name__} cannot run on sharded parameters: {why}. Use one of {names}; "
        "or, if every element of its "
        "update depends on that element alone, say so in the configuration: "
        f'"elementwise_optimizers": ["{cls.__name__}"].'
    )
