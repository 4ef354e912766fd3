"""The list of optimizers that may run on flat shards: those with an element-wise update, and those
that combine whole-tensor numbers in rounds (``whole_tensor.py``).

A shard cuts parameters anywhere, so an update may use the element, its gradient, its own state and
numbers of the group, but nothing computed over a whole tensor (a norm, a row mean, a matrix
product), unless it declares the sums that ranks add up for it. The list is exact: a class not on it
runs only if the user vouches for it by name, or allows untested ones and a probe (``probing.py``)
finds no difference, because a wrong one would train badly in silence.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hf_zero.config.feature_rows import loaded
from hf_zero.config.optimizers import INSTEAD, OPTIMIZERS, WHOLE
from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.optim.adoption import adopted_class, overrides, qualified_name
from hf_zero.optim.probing import difference
from hf_zero.optim.whole_tensor import whole_tensor_base

ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = tuple(
    loaded(row.cls) for row in OPTIMIZERS if row.update == "elementwise"
)
# Classes whose first step sets the momentum to the gradient.
BEGIN_WITH_GRADIENT: tuple[type[torch.optim.Optimizer], ...] = tuple(
    loaded(row.cls) for row in OPTIMIZERS if row.begins_with_gradient
)
_UPDATE_METHODS = ("step", "_init_group", "update")


def elementwise_base(cls: type) -> type[torch.optim.Optimizer] | None:
    """Return the listed class whose update ``cls`` runs unchanged, or None.

    ``cls`` may be a listed class or a subclass of one that overrides none of ``step``,
    ``_init_group`` and ``update``: new defaults in ``__init__`` are fine, a new update is not.
    """
    listed = next((ancestor for ancestor in cls.__mro__ if ancestor in ELEMENTWISE), None)
    if listed is None:
        return None
    return None if overrides(cls, listed, _UPDATE_METHODS) else listed


def update_base(cls: type) -> type[torch.optim.Optimizer] | None:
    """Return the class with the update of ``cls`` unchanged, if flat shards can run it, or None."""
    return elementwise_base(cls) or whole_tensor_base(cls)


def vouched_for(cls: type, allowed: Iterable[str]) -> bool:
    """Return whether the user named ``cls``, as ``"Name"`` or ``"package.module.Name"``."""
    return any(name in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}") for name in allowed)


def check(
    optimizer: torch.optim.Optimizer, allowed: Iterable[str] = (), untested: bool = False
) -> str:
    """Raise unless ``optimizer`` can run on flat shards; return a warning, or "".

    Args:
        optimizer: the user's optimizer object.
        allowed: class names the user vouches for (the configuration's ``elementwise_optimizers``).
        untested: whether an unlisted class runs, with a warning, if a probe finds no difference
            between whole tensors and shards (``zero_allow_untested_optimizer``).

    Raises:
        UnsupportedOptimizerError: its class is neither on the list nor named in ``allowed``, nor
            passes the probe if it is ``untested``, or it is no ``torch.optim.Optimizer`` at all.
    """
    cls = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedOptimizerError(
            f"{cls.__module__}.{cls.__qualname__} is not a torch.optim.Optimizer; pass the "
            "optimizer itself, not a wrapper of it"
        )
    if update_base(adopted_class(cls) or cls) is not None or vouched_for(cls, allowed):
        return ""
    listed = next((base for base in cls.__mro__ if base in ELEMENTWISE), None)
    reason = next((WHOLE[base.__name__] for base in cls.__mro__ if base.__name__ in WHOLE), None)
    if reason is not None:
        why = f"its update needs whole-tensor numbers: {reason}, which is wrong on a shard"
    elif untested:
        mismatch = difference(optimizer)
        if not mismatch:
            return (
                f"zero_allow_untested_optimizer: {qualified_name(cls)} is not known to update each "
                "element by itself; a probe found no difference between whole tensors and shards, "
                "which proves nothing. Confirm it with "
                f'"elementwise_optimizers": ["{cls.__name__}"]'
            )
        why = f"it {mismatch}"
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
    for package, remedy in INSTEAD.items():
        if any(base.__module__.startswith(package) for base in cls.__mro__):
            raise UnsupportedOptimizerError(
                f"optimizer {cls.__name__} cannot run on sharded parameters: {remedy}"
            )
    names = ", ".join(sorted({row.class_name for row in OPTIMIZERS if row.update}))
    raise UnsupportedOptimizerError(
        f"optimizer {cls.__name__} cannot run on sharded parameters: {why}. Use one of {names}; "
        "or, if every element of its update depends on that element alone, say so in the "
        f'configuration: "elementwise_optimizers": ["{cls.__name__}"].'
    )


def updates_in_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer`` can update a part of the model before the rest: others combine
    numbers of whole tensors, or may count the steps of a group.
    """
    kind = type(optimizer)
    return elementwise_base(adopted_class(kind) or kind) is not None
