"""The parameters that several stages of a pipeline hold, under the same name on all of them.

Each stage trains its own copy of a tied parameter, with the sum of all stages' gradients: after the
data-parallel ranks of each stage have averaged theirs, the shards are summed over the stages.
Initial values are those of the first stage that holds the parameter, so that the copies stay
bit-identical.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from hf_zero.device.pinned import upload
from hf_zero.distributed.collective_log import CollectiveLog
from hf_zero.distributed.collectives import MeshDim
from hf_zero.distributed.parallel_groups import ParallelGroups
from hf_zero.distributed.stage_messages import dim_of_stages
from hf_zero.distributed.world_group import get_world_group
from hf_zero.errors import PartitionError
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
    parameters = dict(module.named_parameters())
    stage_of = [groups.dims.coordinate(rank, "pipeline") for rank in range(groups.dims.world)]
    described = {name: (tuple(p.shape), str(p.dtype)) for name, p in parameters.items()}
    every = get_world_group().all_gather_object(described, "parameters of the stages")
    holders: dict[str, dict[int, object]] = {}
    for stage, described in zip(stage_of, every):
        for name, what in described.items():
            holders.setdefault(name, {})[stage] = what
    buffers = [name for name, _ in module.named_buffers()]
    names = get_world_group().all_gather_object(buffers, "buffers of the stages")
    every_name = {*holders, *(name for stages in names for name in stages)}
    module.elsewhere = frozenset(every_name - set(parameters) - set(buffers))
    for name, stages in holders.items():
        if len(stages) > 1 and len(set(stages.values())) > 1:
            raise PartitionError(
                f"{name} is tied over stages {sorted(stages)} of the pipeline, and differs "
                f"there: {list(stages.values())}; build it alike on all of them"
            )
    tied = {
        name: tuple(sorted(stages)) for name, stages in sorted(holders.items()) if len(stages) > 1
    }
    set_tied(module, tied)


def set_tied(module: StagedModule, tied: Mapping[str, tuple[int, ...]]) -> None:
    """Mark the parameters of ``module`` that several stages hold: ``tied`` has these, by name."""
    module.tied = tied
    parameters = dict(module.named_parameters())
    for name in set(tied) & set(parameters):
        set_sharding(parameters[name], replace(sharding_of(parameters[name]), pp_stages=tied[name]))


class TiedParameters:
    """The parameters of ``module`` that :func:`mark_tied` found. The constructor sets the values of
    their first stage (collective over all ranks). ``name`` names the engine in messages.
    """

    def __init__(self, module: StagedModule, groups: ParallelGroups, name: str, timeout: float):
        self._along: dict[tuple[int, ...], MeshDim] = {}
        self._device = groups.device
        along = (groups.dims.ranks_along(rank, "pipeline") for rank in range(groups.dims.world))
        self._columns = set(along)  # ranks of each pipeline
        for stages in sorted(set(module.tied.values())):
            title = f"{name}, weights tied over stages {', '.join(map(str, stages))}"
            self._along[stages] = dim_of_stages(groups, stages, title, timeout)
        parameters = dict(module.named_parameters())
        for name, stages in module.tied.items():
            if name in parameters:
                self._take_first(parameters[name], self._along[stages], name)

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
        local = {
            stages: [(flat.layout.slots, flat.layout.padded, str(flat.dtype)) for flat in of_stages]
            for stages, of_stages in self._flats(flats).items()
        }
        every = get_world_group().all_gather_object(local, "tied parameters")
        for stages, column in itertools.product(self._along, self._columns):
            # empty where a stage has frozen them all
            shared = [every[rank].get(stages, []) for at, rank in enumerate(column) if at in stages]
            if any(entry != shared[0] for entry in shared):
                raise PartitionError(
                    f"the parameters tied over stages {list(stages)} of the pipeline lie in "
                    "different flat buffers there; give them the same optimizer group, or freeze "
                    "them, on all of these stages"
                )

    def _flats(self, flats: Sequence[FlatBuffer]) -> dict[tuple[int, ...], list[FlatBuffer]]:
        """Return the flat buffers of tied parameters by stages, in an order equal on all stages."""
        by_stages: dict[tuple[int, ...], list[FlatBuffer]] = {}
        for flat in flats:
            if flat.spec.sharding.pp_stages and flat.trainable:
                by_stages.setdefault(flat.spec.sharding.pp_stages, []).append(flat)
        for flats_of_stages in by_stages.values():
            flats_of_stages.sort(key=lambda flat: flat.layout.slots[0].name)
        return dict(sorted(by_stages.items()))

    @torch.no_grad()
    def add_up(self, flats: Sequence[FlatBuffer]) -> None:
        """Sum the reduced gradients of tied parameters over their stages, once before each step
        (collective over these stages).
        """
        for stages, of_stages in self._flats(flats).items():
            for flat in of_stages:
                shard, along = flat.gradient.writing(), self._along[stages]
                total = shard.to(self._device) if flat.gradient.holds_gradient else None
                if total is None:
                    total = torch.zeros_like(shard, device=self._device)
                along.all_reduce(total, f"gradient of {flat.key}, tied").wait()
                if total.data_ptr() != shard.data_ptr():
                    shard.copy_(total)
                self._add_used(flat, along)
                flat.gradient.mark_reduced()

    def _add_used(self, flat: FlatBuffer, along: MeshDim) -> None:
        """Mark the parameters of ``flat`` as used that a stage has used (collective)."""
        gradient, count = flat.gradient, len(flat.layout.slots)
        bits = [float(gradient.used >> index & 1) for index in range(count)]
        used = upload(torch.tensor(bits), self._device)
        along.all_reduce(used, f"used parameters of {flat.key}, tied").wait()
        if gradient.used != gradient.all_used:  # else do not wait for the device
            gradient.mark_used(sum(1 << at for at, n in enumerate(used.tolist()) if n))

    @property
    def mesh_dims(self) -> list[MeshDim]:
        """The dimensions over which gradients of tied parameters are summed."""
        return list(self._along.values())

    @property
    def logs(self) -> list[CollectiveLog]:
        """The logs of its communicators."""
        return [log for along in self.mesh_dims for log in (along.gathers, along.reductions)]

    def close(self) -> None:
        for along in self._along.values():
            along.close()
