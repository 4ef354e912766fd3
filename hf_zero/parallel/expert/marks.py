"""Which parameters belong to experts that are spread over ranks: DeepSpeed's marks on them, and
the groups that an optimizer has of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

ALONE = "ep_size_1"  # the expert group of a rank that has all experts


def mark(parameter: torch.Tensor, group: str | None) -> None:
    """Make ``parameter`` one of experts, whose gradients are averaged over those ranks alone that
    hold the same ones: ``group`` names their expert group.
    """
    parameter.allreduce = False  # type: ignore[attr-defined]
    parameter.group_name = group  # type: ignore[attr-defined]


def is_expert_parameter(parameter: torch.Tensor) -> bool:
    return not getattr(parameter, "allreduce", True)


def expert_group(parameter: torch.Tensor) -> str | None:
    """The name of the expert group of ``parameter``."""
    return getattr(parameter, "group_name", None)


def split(parameters: Iterable[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Those of all ranks, and those of experts."""
    given = list(parameters)
    return (
        [p for p in given if not is_expert_parameter(p)],
        [p for p in given if is_expert_parameter(p)],
    )


def split_groups(
    groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: int | None = None
) -> list[dict[str, Any]]:
    """``groups`` of an optimizer without the parameters of experts, then groups of those.

    A group of experts has the options of the one it comes from, "moe": True and its expert group
    as "name"; those with more than ``max_group_size`` elements are cut between parameters.
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
