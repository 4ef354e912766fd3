"""``deepspeed.moe.utils``: which parameters belong to experts that are spread over ranks. Such
layers are not built, so a parameter is one only where a script has marked it by ``allreduce =
False``; groups without any stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from hf_zero.integrations.deepspeed.placeholders import refuse

GATHERED = (
    "leave the experts in the model: set_z3_leaf_modules gathers them together, and every rank "
    "computes its own tokens"
)


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether ``m`` has layers of DeepSpeed's class MoE, and their number of experts."""
    return False, 0


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether a script has marked ``param`` as one of an expert on this rank alone."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(
    params: Iterable[torch.nn.Parameter],
) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """The parameters of all ranks, and those of experts."""
    given = list(params)
    return [p for p in given if not is_moe_param(p)], [p for p in given if is_moe_param(p)]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: int | None = None
) -> list[dict[str, Any]]:
    """The groups, as a list. Raises NotBuiltError for parameters of experts."""
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    found = [{**group, "params": list(group["params"])} for group in groups]
    if any(is_moe_param(param) for group in found for param in group["params"]):
        refuse("a group of parameters of experts that are spread over ranks", GATHERED)
    return found


def configure_moe_param_groups(
    model_parameters: Iterable[Any],
) -> list[Any]:
    """Parameters or groups of them as they are. Raises NotBuiltError for those of experts."""
    given = list(model_parameters)
    if given and isinstance(given[0], dict):
        return split_params_into_different_moe_groups_for_optimizer(given)
    return split_params_into_different_moe_groups_for_optimizer({"params": given})[0]["params"]
