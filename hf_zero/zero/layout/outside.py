"""Parameters of an optimizer that no module of the model has, such as the weights of a loss. They
are one unit without modules: whole on every rank at each ZeRO stage, and reduced at the end of a
backward, since no hook tells when it is done with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from hf_zero.errors import PartitionError
from hf_zero.logging import counted, listed
from hf_zero.zero.layout.shared_memory import refuse_shared
from hf_zero.zero.layout.wrap import UnitSpec

PREFIX = "optimizer"  # of the names of such parameters


def outside_unit(
    optimizer: torch.optim.Optimizer | None, units: Sequence[UnitSpec], aliases: Mapping[str, str]
) -> UnitSpec | None:
    """Return the unit of the parameters of ``optimizer`` that are in none of ``units``, those of
    the model; None without any. ``aliases``: other names of parameters in the model.

    They are called ``optimizer.<group>.<position among them in the group>``, where ``<group>`` is
    the ``name`` of the group, or its index. One that the optimizer was given with a name (the
    group's ``param_names``) is called ``optimizer.<name>``.
    """
    if optimizer is None:
        return None
    inside = {id(parameter) for unit in units for _, parameter in unit.parameters}
    if inside.issuperset([id(p) for group in optimizer.param_groups for p in group["params"]]):
        return None
    taken = {name for unit in units for name, _ in unit.parameters}.union(aliases)
    prefix = PREFIX
    while any(name.partition(".")[0] == prefix for name in taken):
        prefix += "_"
    named: dict[str, nn.Parameter] = {}
    for index, group in enumerate(optimizer.param_groups):
        params, names = group["params"], group.get("param_names") or ()
        given = names if len(names) == len(params) else [""] * len(params)
        others = [pair for pair in zip(given, params) if id(pair[1]) not in inside]
        for at, (own_name, parameter) in enumerate(others):
            name = f"{prefix}.{own_name or '{}.{}'.format(group.get('name', index), at)}"
            named[f"{prefix}.{index}.{at}" if name in named else name] = parameter
    return UnitSpec((prefix,), (), tuple(named.items()))


def described(others: Sequence[tuple[str, nn.Parameter]]) -> str:
    """Return the number, names and shapes of the parameters ``others``, for messages."""
    shapes = listed((f"{name} of shape {tuple(p.shape)}" for name, p in others), 3)
    return f"{counted(len(others), 'parameter')} ({shapes})"


def check_outside(
    model: nn.Module, others: Sequence[tuple[str, nn.Parameter]], group_of: Mapping[str, int]
) -> None:
    """Check the parameters ``others`` of an optimizer outside ``model``. ``group_of``: the group of
    each parameter that trains.

    Raises PartitionError if parameters of the model would train and are in none of its groups: it
    was built over another model, or before parameters of this one were replaced. Also for those
    that share memory with the model.
    """
    forgotten = [
        name for name, p in model.named_parameters() if p.requires_grad and name not in group_of
    ]
    if forgotten:
        raise PartitionError(
            f"the optimizer holds {described(others)} outside the model, and lacks "
            f"{listed(forgotten, 3)} of the model, which require grad; build it from "
            "model.parameters() of the model given to initialize, after the model has its final "
            "parameters, or freeze what shall not train (requires_grad_(False))"
        )
    refuse_shared(model, others)
