"""DeepSpeed's marks on the parameters of experts that are spread over ranks, and the optimizer
groups of these parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

ALONE = "ep_size_1"  # the expert group of a rank that has all experts


def mark(parameter: torch.Tensor, group: str | None) -> None:
    """Mark ``parameter`` as an expert parameter, whose gradient is averaged only over the ranks
    that hold the same experts. ``group``: name of their expert group.
    """
    parameter.allreduce = False  # type: ignore[attr-defined]
    parameter.group_name = group  # type: ignore[attr-defined]


def is_expert_parameter(parameter: torch.Tensor) -> bool:
    return not getattr(parameter, "allreduce", True)


def expert_group(parameter: torch.Tensor) -> str | None:
    """Return the name of the expert group of ``parameter``, or None."""
    return getattr(parameter, "group_name", None)


def split(parameters: Iterable[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the shared parameters and the expert parameters, as two lists."""
    given = list(parameters)
    return (
        [p for p in given if not is_expert_parameter(p)],
        [p for p in given if is_expert_parameter(p)],
    )


def split_groups(
    groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: int | None = None
) -> list[dict[str, Any]]:
    """Return the optimizer's ``groups`` without expert parameters, followed by groups of expert
    parameters.

    An expert group has the options of its original group, "moe": True and the name of its expert
    group as "name"; groups of more than ``max_group_size`` elements are split between parameters.
    """
    given = [groups] if isinstance(groups, dict) else list(groups)
    shared: list[dict[str, Any]] = []
    experts: list[dict[str, Any]] = []
    for group in given:
        common, own = split(group["params"])
        shared.append({**group, "params": common})
        by_name: dict[str | None, list[nn.Parameter]] = {}
        for parameter in own:
            by_name.setdefault(expert_group(parameter), []).append(parameter)
        for name, members in by_name.items():
            experts += [
                {**group, "name": name, "moe": True, "params": part}
                for part in _cut(members, max_group_size)
            ]
    return shared + experts


def _cut(parameters: list[nn.Parameter], most: int | None) -> list[list[nn.Parameter]]:
    parts: list[list[nn.Parameter]] = [[]]
    held = 0
    for parameter in parameters:
        if most is not None and parts[-1] and held + parameter.numel() > most:
            parts.append([])
            held = 0
        parts[-1].append(parameter)
        held += parameter.numel()
    return parts
