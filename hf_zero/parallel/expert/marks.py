"""Marks on the parameters of experts that are spread over ranks, the optimizer groups of these
parameters, and the data-parallel ranks that hold different experts (the expert axis). Names of the
marks are DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hf_zero.distributed import init
from hf_zero.distributed.collectives import MeshDim
from hf_zero.distributed.parallel_dims import ParallelDims, check_size
from hf_zero.distributed.parallel_groups import dims_in_effect, init_parallel
from hf_zero.errors import ConfigError

ALONE = "ep_size_1"  # the expert group of a rank that has all experts

AXIS = "expert"


def mark(parameter: torch.Tensor, group: str | None) -> None:
    """Mark ``parameter`` as an expert parameter, whose gradient is averaged only over the ranks
    that hold the same experts. ``group``: name of their expert group.
    """
    parameter.allreduce = False  # type: ignore[attr-defined]
    parameter.group_name = group  # type: ignore[attr-defined]


def is_expert_parameter(param: torch.Tensor) -> bool:
    return not getattr(param, "allreduce", True)


def expert_group(parameter: torch.Tensor) -> str | None:
    """Return the name of the expert group of ``parameter``, or None."""
    return getattr(parameter, "group_name", None)


def split(params: Iterable[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the shared parameters and the expert parameters, as two lists."""
    listed = list(params)
    return (
        [p for p in listed if not is_expert_parameter(p)],
        [p for p in listed if is_expert_parameter(p)],
    )


def split_groups(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: int | None = None
) -> list[dict[str, Any]]:
    """Return the optimizer's ``param_groups`` without expert parameters, followed by groups of
    expert parameters.

    An expert group has the options of its original group, "moe": True and the name of its expert
    group as "name"; groups of more than ``max_group_size`` elements are split between parameters.

    Raises ConfigError for a group that is no dict with "params", and parameters that are no
    tensors.
    """
    listed = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    shared: list[dict[str, Any]] = []
    experts: list[dict[str, object]] = []
    for group in listed:
        common, expert_parameters = split(_parameters(group))
        shared.append({**group, "params": common})
        by_name: dict[str | None, list[nn.Parameter]] = {}
        for parameter in expert_parameters:
            by_name.setdefault(expert_group(parameter), []).append(parameter)
        for name, members in by_name.items():
            experts += [
                {**group, "name": name, "moe": True, "params": part}
                for part in _cut(members, max_group_size)
            ]
    return shared + experts


def _parameters(group: dict[str, Any]) -> list[nn.Parameter]:
    if not isinstance(group, dict) or "params" not in group:
        keys = f"has the keys {[*group]}, no 'params'" if isinstance(group, dict) else None
        raise ConfigError(
            f"an optimizer group {keys or f'is a {type(group).__name__}'}; pass parameters alone, "
            "or dicts with their parameters as 'params'"
        )
    params = group["params"]
    listed: list[Any] = [params] if isinstance(params, torch.Tensor) else list(params)
    for parameter in listed:
        if not isinstance(parameter, torch.Tensor):
            raise ConfigError(
                f"a parameter of an optimizer group is a {type(parameter).__name__}; pass tensors, "
                "such as model.parameters()"
            )
    return listed


def _cut(parameters: list[nn.Parameter], most: int | None) -> list[list[nn.Parameter]]:
    parts: list[list[nn.Parameter]] = [[]]
    numel = 0
    for parameter in parameters:
        if most is not None and parts[-1] and numel + parameter.numel() > most:
            parts.append([])
            numel = 0
        parts[-1].append(parameter)
        numel += parameter.numel()
    return parts


def expert_mesh_dim(size: int, key: str) -> MeshDim | None:
    """Return the mesh dimension of ``size`` expert-parallel ranks, or None for one rank. The first
    call creates it (collective over all ranks of the job). Arguments and errors:
    :func:`expert_dims`.
    """
    dims = expert_dims(size, key)
    return None if dims is None else init_parallel(dims).along(AXIS)


def expert_dims(size: int, key: str, dims: ParallelDims | None = None) -> ParallelDims | None:
    """Return the job's mesh dimensions with experts spread over ``size`` ranks, or None for one
    rank. ``key``: the setting that requests the size, for error messages; ``dims``: the
    dimensions without them, by default those in effect.

    Raises ConfigError for an invalid size, a size that does not divide the ranks that read
    different tokens, and a second size in a job.
    """
    check_size(size, key)
    if size == 1:
        return None
    init.init_distributed()
    dims = dims or dims_in_effect()
    if dims.expert not in (1, size):
        raise ConfigError(
            f"{key} = {size} was asked for in a job whose experts are spread over {dims.expert} "
            "ranks; the size stays for the life of the processes, after engine.destroy() too: "
            "start new ones for another"
        )
    if dims.gradient_ranks % size:
        raise ConfigError(
            f"{key} = {size} does not divide the {dims.gradient_ranks} ranks that read different "
            "tokens; choose a divisor of it"
        )
    return replace(dims, expert=size)
