"""Tied parameters: held by several stages of a pipeline, under the same name on all of them.

Each stage trains its own copy, with the sum of all stages' gradients: after the data-parallel ranks
of each stage have averaged theirs, the shards are summed over the stages. Initial values are those
of the first stage that holds the parameter, so that the copies stay bit-identical.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from hf_zero.distributed.collectives import MeshDim
from hf_zero.distributed.parallel_groups import ParallelGroups
from hf_zero.distributed.world_group import get_world_group
from hf_zero.errors import PartitionError
from hf_zero.parallel.pipeline.stage_messages import dim_of_stages
from hf_zero.parallel.pipeline.staged import StagedModule
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.sharding import set_sharding, sharding_of


def mark_tied(module: StagedModule, groups: ParallelGroups) -> None:
    """Mark the tied parameters of ``module`` with their stages, for the plan of its engine
    (collective over all ranks); note the names that only other stages hold.

    Raises PartitionError for parameters that differ between stages.
    """
    module.elsewhere, module.tied = frozenset(), {}
    if groups.dims.pipeline == 1:
        return
    own = dict(module.named_parameters())
    stage_of = [groups.dims.coordinate(rank, "pipeline") for rank in range(groups.dims.world)]
    described = {name: (tuple(p.shape), str(p.dtype)) for name, p in own.items()}
    every = get_world_group().all_gather_object(described, "parameters of the stages")
    holders: dict[str, dict[int, object]] = {}
    for stage, described in zip(stage_of, every):
        for name, what in described.items():
            holders.setdefault(name, {})[stage] = what
    buffers = [name for name, _ in module.named_buffers()]
    names = get_world_group().all_gather_object(buffers, "buffers of the stages")
    every_name = {*holders, *(name for held in names for name in held)}
    module.elsewhere = frozenset(every_name - set(own) - set(buffers))
    for name, held in holders.items():
        if len(held) > 1 and len(set(held.values())) > 1:
            raise PartitionError(
                f"{name} is tied over stages {sorted(held)} of the pipeline, and differs "
                f"there: {list(held.values())}; build it alike on all of them"
            )
    module.tied = {
        name: tuple(sorted(held)) for name, held in sorted(holders.items()) if len(held) > 1
    }
    for name in set(module.tied) & set(own):
        set_sharding(own[name], replace(sharding_of(own[name]), stages=module.tied[name]))


class TiedParameters:
    """The parameters of ``module`` that :func:`mark_tied` found. The constructor sets the values of
    their first stage (collective over all ranks).
    """

    def __init__(self, module: StagedModule, groups: ParallelGroups, timeout: float):
        self._along: dict[tuple[int, ...], MeshDim] = {}
        self._device = groups.device
        along = (groups.dims.ranks_along(rank, "pipeline") for rank in range(groups.dims.world))
        self._columns = set(along)  # ranks of each pipeline
        for stages in sorted(set(module.tied.values())):
            name = f"weights tied over stages {', '.join(map(str, stages))}"
            self._along[stages] = dim_of_stages(groups, stages, name, timeout)
        own = dict(module.named_parameters())
        for name, stages in module.tied.items():
            if name in own:
                self._take_first(own[name], self._along[stages], name)

    @torch.no_grad()
    def _take_first(self, parameter: torch.Tensor, along: MeshDim, name: str) -> None:
        """Broadcast the value of the first stage to all stages: the others add zeros to it."""
        value = parameter.detach().to(self._device, copy=True)
        if along.rank:
            value.zero_()
        along.all_reduce(value, f"first values of {name}").wait()
        parameter.copy_(value)

    def check(self, flats: Sequence[FlatBuffer]) -> None:
        """Raise PartitionError, on all ranks, unless the stages of each pipeline hold tied
        parameters in the same flat buffers (collective over all ranks). Those of different
        pipelines may differ: they may hold another part of the parameters.
        """
        if not self._along:
            return
        own = {
            stages: [(flat.layout.slots, flat.layout.padded, str(flat.dtype)) for flat in of_stages]
            for stages, of_stages in self._flats(flats).items()
        }
        every = get_world_group().all_gather_object(own, "tied parameters")
        for stages, column in itertools.product(self._along, self._columns):
            found = [every[rank][stages] for rank in column if every[rank].get(stages)]
            if any(each != found[0] for each in found):
                raise PartitionError(
                    f"the parameters tied over stages {list(stages)} of the pipeline lie in "
                    "different flat buffers there; give them the same optimizer group, or freeze "
                    "them, on all of these stages"
                )

    def _flats(self, flats: Sequence[FlatBuffer]) -> dict[tuple[int, ...], list[FlatBuffer]]:
        """Return the flat buffers of tied parameters by stages, in an order equal on all stages."""
        found: dict[tuple[int, ...], list[FlatBuffer]] = {}
        for flat in flats:
            if flat.spec.sharding.stages and flat.trainable:
                found.setdefault(flat.spec.sharding.stages, []).append(flat)
        for each in found.values():
            each.sort(key=lambda flat: flat.layout.slots[0].name)
        return dict(sorted(found.items()))

    @torch.no_grad()
    def add_up(self, flats: Sequence[FlatBuffer]) -> None:
        """Sum the reduced gradients of tied parameters over their stages, once before each step
        (collective over these stages).
        """
        for stages, of_stages in self._flats(flats).items():
            for flat in of_stages:
                shard, along = flat.gradient.shard, self._along[stages]
                assert shard is not None
                flat.optimizer_shard.wait_for_update()
                total = shard.to(self._device) if flat.gradient.holds_gradient else None
                if total is None:
                    total = torch.zeros_like(shard, device=self._device)
                along.all_reduce(total, f"gradient of {flat.key}, tied").wait()
                if total.data_ptr() != shard.data_ptr():
                    shard.copy_(total)
                flat.gradient.mark_used(flat.gradient.all_used)
                flat.gradient.mark_reduced()

    def close(self) -> None:
        for along in self._along.values():
            along.close()
