"""``deepspeed.moe.utils``: which parameters are of experts, and groups of an optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from hf_zero.parallel.expert.marks import split_groups
from hf_zero.parallel.expert.moe_layer import MoE


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether ``m`` has layers of the class MoE, and the number of experts of the first."""
    found = next((each for each in m.modules() if isinstance(each, MoE)), None)
    return found is not None, 0 if found is None else found.num_experts


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    return bool(param_group.get("moe", False))


def configure_moe_param_groups(model_parameters: Iterable[Any]) -> list[Any]:
    """Parameters, or groups of them, with those of experts in groups of their own where there are
    any.
    """
    given = list(model_parameters)
    if given and isinstance(given[0], dict):
        return split_groups(given)
    groups = split_groups({"params": given})
    return given if len(groups) == 1 else groups
