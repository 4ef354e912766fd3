"""``deepspeed.moe.utils``: layers with experts in a model, and groups of their parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hf_zero.parallel.expert.marks import split_groups
from hf_zero.parallel.expert.moe_layer import MoE


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return whether ``m`` has layers of the class MoE, and the number of experts of the first."""
    first = next((module for module in m.modules() if isinstance(module, MoE)), None)
    return first is not None, 0 if first is None else first.num_experts


def configure_moe_param_groups(
    model_parameters: torch.Tensor | dict[str, Any] | Iterable[Any],
) -> list[Any]:
    """Return parameters, or groups of them, with those of experts, if any, in separate groups.
    Groups of which one has the key "moe" are divided already and stay as they are. Raises
    ConfigError as :func:`split_groups`.
    """
    lone = isinstance(model_parameters, (torch.Tensor, dict))
    parameters: list[Any] = [model_parameters] if lone else list(model_parameters)
    if any(isinstance(item, dict) for item in parameters):
        divided = all(isinstance(item, dict) for item in parameters) and any(
            "moe" in group for group in parameters
        )
        return parameters if divided else split_groups(parameters)
    groups = split_groups({"params": parameters})
    return parameters if len(groups) == 1 else groups
