"""Construction of an engine's mesh from its configuration and the sharding of its parameters."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.distributed.flat_mesh import MeshOptions
from hf_zero.distributed.mesh import Mesh
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.distributed.process_group import get_world_size
from hf_zero.distributed.world_group import get_world_group
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.zero.layout.sharding import sharding_of
from hf_zero.zero.layout.stage_policy import POLICIES


def make_mesh(
    model: nn.Module,
    config: ZeroConfig,
    device: torch.device,
    node: int = 1,
    hierarchical: str = "",
    needs_one_mesh: Sequence[str] = (),
) -> Mesh:
    """Return the mesh for the engine of ``model`` on ``device`` (collective over all ranks of the
    job); the other arguments as in :class:`hf_zero.zero.extensions.Extensions`.

    Raises PartitionError for parameters cut along axes that the job does not have, and ConfigError
    for keys that do not go with model parallelism.
    """
    policy, parallel = POLICIES[config.stage], get_parallel()
    ranks = get_world_size()
    cuts: set[tuple[str, ...]] = {()}
    for name, tensor in _tensors(model):
        cuts.add(axes := sharding_of(tensor).axes)
        for axis in axes:
            if parallel is None or parallel.dims.size(axis) == 1:
                raise PartitionError(
                    f"{name} is cut along the {axis!r} axis, which this job does not have; call "
                    f"init_parallel(ParallelDims.over(ranks, {axis}=...)) before the model is cut"
                )
    if parallel is not None and parallel.dims.splits_model:
        _refuse_keys(needs_one_mesh)
        ranks //= parallel.dims.pipeline
        # pipeline stages may hold other kinds, and every rank takes part in making process groups
        every = get_world_group().all_gather_object(sorted(cuts), "how parameters are cut")
        cuts = set(itertools.chain.from_iterable(every))
    shards = policy.shards(ranks, config.replicate_size)
    options = MeshOptions(
        config.offload_optimizer.on and policy.gathers_after_step,
        node,
        _ranks_of_a_host(shards, hierarchical) if hierarchical else 1,
        tuple(sorted(cuts)),
    )
    return Mesh(shards, device, config.timeout, options, parallel)


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


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _refuse_keys(wrong: Sequence[str]) -> None:
    """Raise ConfigError for keys whose messages need one mesh of all ranks."""
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)} does not go with a model that is split over ranks by tensor, "
            "expert or pipeline parallelism; remove the key"
        )
