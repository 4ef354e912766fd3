"""Plans of engines, made without one, and models of given sizes on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.device import kinds
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.zero.extensions import extensions_of
from hf_zero.zero.layout.engine_plan import EnginePlan
from hf_zero.zero.layout.planner import plan


def adamw_of(model: nn.Module) -> torch.optim.Optimizer | None:
    """AdamW over the parameters of ``model`` that train; None if none does."""
    trains = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trains) if trains else None


def planned(
    model: nn.Module,
    config: Any,
    dims: ParallelDims | int = 1,
    optimizer: Any = adamw_of,
    gpu: bool = False,
    **more: Any,
) -> EnginePlan:
    """Return the plan of an engine; ``optimizer``: one, None, or a function of the model."""
    dims = ParallelDims(dims) if isinstance(dims, int) else dims
    settings = config if isinstance(config, ZeroConfig) else ZeroConfig.from_dict(config)
    if settings.world_size is None:
        settings = settings.resolve(dims.pp_stage_ranks)
    own = optimizer(model) if callable(optimizer) else optimizer
    more = {"extensions_of": extensions_of, "device": kinds.device_for_estimate(gpu), **more}
    return plan(model, settings, dims, own, **more)


class Block(nn.Module):
    """One vector of ``numel`` elements, which stays in fp32 if it is ``wide``."""

    def __init__(self, numel: int, trains: bool = True, wide: bool = False) -> None:
        super().__init__()
        empty = torch.empty(numel, device="meta")
        self.register_parameter("wide" if wide else "narrow", nn.Parameter(empty, trains))


class Blocks(nn.Module):
    """Blocks of given sizes, each a unit of its own, and a vector of ``root`` elements beside."""

    _keep_in_fp32_modules_strict = ("wide",)

    def __init__(self, blocks: Sequence[tuple[Any, ...]], root: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(*each) for each in blocks)
        if root:
            self.root = nn.Parameter(torch.empty(root, device="meta"))


# no parameter stays whole at stage 3, and each block is a unit
APART = {"stage3_param_persistence_threshold": 0, "stage3_module_granularity_threshold": 0}
