"""``deepspeed.moe.utils``: layers with experts in a model, and groups of their parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from hf_zero.parallel.expert.marks import split_groups
from hf_zero.parallel.expert.moe_layer import MoE


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return whether ``m`` has layers of the class MoE, and the number of experts of the first."""
    first = next((module for module in m.modules() if isinstance(module, MoE)), None)
    return first is not None, 0 if first is None else first.num_experts


def configure_moe_param_groups(model_parameters: Iterable[Any]) -> list[Any]:
    """Return parameters, or groups of them, with those of experts, if any, in separate groups."""
    parameters = list(model_parameters)
    if parameters and isinstance(parameters[0], dict):
        return split_groups(parameters)
    groups = split_groups({"params": parameters})
    return parameters if len(groups) == 1 else groups
