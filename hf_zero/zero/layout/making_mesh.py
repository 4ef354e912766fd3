"""Construction of an engine's mesh from its plan."""

from __future__ import annotations

import itertools
import os

import torch
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.distributed.flat_mesh import MeshOptions
from hf_zero.distributed.mesh import Mesh
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.distributed.process_group import default_device, get_rank, get_world_size
from hf_zero.distributed.world_group import get_world_group
from hf_zero.errors import ConfigError
from hf_zero.zero.layout.engine_plan import EnginePlan, ExtensionsOf, plan


def plan_on_this_rank(
    model: nn.Module,
    settings: ZeroConfig,
    optimizer: torch.optim.Optimizer | None,
    extensions_of: ExtensionsOf,
    keeps_dtypes: bool = False,
) -> EnginePlan:
    """Return the plan of an engine of this rank of the running job; see
    :func:`hf_zero.zero.layout.engine_plan.plan`.
    """
    parallel = get_parallel()
    dims = ParallelDims(get_world_size()) if parallel is None else parallel.dims
    return plan(
        model,
        settings,
        dims,
        optimizer,
        extensions_of=extensions_of,
        rank=get_rank(),
        device=default_device(),
        keeps_dtypes=keeps_dtypes,
    )


def make_mesh(planned: EnginePlan) -> Mesh:
    """Return the mesh for the engine of ``planned`` (collective over all ranks of the job)."""
    settings, extensions, parallel = planned.settings, planned.extensions, get_parallel()
    cuts = set(planned.axes)
    if planned.dims.splits_model:
        # pipeline stages may hold other kinds, and every rank takes part in making process groups
        every = get_world_group().all_gather_object(sorted(cuts), "how parameters are cut")
        cuts = set(itertools.chain.from_iterable(every))
    hierarchical = extensions.hierarchical
    options = MeshOptions(
        settings.offload_optimizer.on and planned.policy.gathers_after_step,
        extensions.node,
        _ranks_of_a_host(planned.shards, hierarchical) if hierarchical else 1,
        tuple(sorted(cuts)),
    )
    return Mesh(planned.shards, planned.device, settings.timeout, options, parallel)


def _ranks_of_a_host(shards: int, key: str) -> int:
    """Return the number of ranks per host, 1 if one host has all ``shards`` ranks that share a copy
    (collective over all ranks of the job); ``key`` asks for it.
    """
    world = get_world_group()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", get_world_size()))
    each = set(world.all_gather_object(here, "ranks of each host"))
    if shards <= min(each):
        return 1
    if len(each) > 1 or shards % min(each):
        raise ConfigError(
            f"{key} needs the same number of ranks on each host, of which the {shards} that share "
            f"one copy are a multiple; hosts have {', '.join(map(str, sorted(each)))}: choose "
            "another number of ranks for a copy, or remove the key"
        )
    return min(each)
