"""Base of models that are cut into pipeline stages, with the methods that an engine calls, and the
parameters that several stages hold, under the same name on all of them.

Each stage trains its own copy of a tied parameter, with the sum of all stages' gradients: after the
data-parallel ranks of each stage have averaged theirs, the shards are summed over the stages.
Initial values are those of the first stage that holds the parameter, so that the copies stay
bit-identical.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from hf_zero.device.pinned import upload
from hf_zero.distributed import init, process_group
from hf_zero.distributed.collective_log import CollectiveLog
from hf_zero.distributed.collectives import MeshDim
from hf_zero.distributed.parallel_dims import ParallelDims, check_size
from hf_zero.distributed.parallel_groups import ParallelGroups, get_parallel, init_parallel
from hf_zero.distributed.stage_messages import dim_of_stages
from hf_zero.distributed.world_group import get_world_group
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.parallel.pipeline.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.sharding import set_sharding, sharding_of
from hf_zero.zero.layout.walk import StagedModel


class StagedModule(StagedModel):
    """The stages that this rank holds: ``stages_per_rank`` of the ``stages_per_rank * num_stages``
    stages of a pipeline. A sample passes ``num_stages`` ranks. Stage k is on the rank at ``k %
    num_stages`` of the axis "pipe" of ``topology``.
    """

    # of ``hf_zero.parallel.pipeline.staged.mark_tied``: names that only other stages hold, and the
    # stages of each tied parameter, by name
    elsewhere: frozenset[str] = frozenset()
    tied: Mapping[str, tuple[int, ...]] = MappingProxyType({})

    micro_offset = 0  # micro-batches before that of the next forward; seeds layers

    def __init__(
        self,
        num_stages: int | None,
        topology: ProcessTopology | None = None,
        stages_per_rank: int = 1,
    ):
        """Subclasses call :meth:`make_parallel` after all checks. Raises ConfigError if the started
        ranks do not match the topology.
        """
        super().__init__()
        init.init_distributed()
        world, self.global_rank = process_group.get_world_size(), process_group.get_rank()
        if topology is None:
            if num_stages is None:
                raise ConfigError("a pipeline needs num_stages or topology; pass one")
            check_size(num_stages, "num_stages")
            topology = _topology_of(num_stages, world)
        if not isinstance(topology, ProcessTopology):
            raise ConfigError(
                f"topology = {topology!r:.40} is none of a pipeline; pass a ProcessTopology, or "
                "num_stages alone"
            )
        if topology.world_size() != world or not topology.get_dim("pipe"):
            raise ConfigError(
                f"the topology of the pipeline is {topology}, and {world} ranks were started; it "
                'needs an axis "pipe", and as many places as there are ranks'
            )
        if num_stages not in (None, topology.get_dim("pipe")):
            raise ConfigError(
                f"num_stages is {num_stages}, and the axis pipe of the topology has "
                f"{topology.get_dim('pipe')} ranks; pass one of them"
            )
        _dims_of(topology)  # its checks: a refused pipeline leaves the job as it was
        check_size(stages_per_rank, "stages_per_rank", "stages")
        self.topology = topology
        self.num_stages = topology.get_dim("pipe")
        self.stages_per_rank = stages_per_rank
        self.stage_id: int = topology.get_coord(self.global_rank).pipe

    def make_parallel(self) -> None:
        """Make the job parallel by the topology (collective)."""
        init_parallel(_dims_of(self.topology))

    @property
    def stages_here(self) -> list[int]:
        """The stages that this rank holds."""
        return list(range(self.stage_id, self.num_stages * self.stages_per_rank, self.num_stages))

    def forward(self, inputs: object, stage: int | None = None) -> object:
        """Return the output of ``stage`` for ``inputs``; None: the only stage of this rank."""
        raise NotImplementedError

    def loss(self, output: object, labels: object) -> torch.Tensor:
        """Return the mean loss of the last stage's output."""
        raise NotImplementedError

    def split_batch(self, batch: object) -> tuple[Any, Any]:
        """Split a micro-batch into the inputs of the first stage and the labels of the loss."""
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ConfigError(
                f"a micro-batch of a pipeline is (inputs, labels), not of type "
                f"{type(batch).__name__}; collate it so, or pass a function to engine.set_batch_fn"
            )
        return batch[0], batch[1]


def make_parallel_for(model: nn.Module) -> None:
    """Reset the job's pipeline and tensor parallelism to those of ``model``, since another model of
    this process may have set others (collective if so).
    """
    groups = get_parallel()
    if groups is None:
        return
    if isinstance(model, StagedModule):
        if groups.dims.pipeline != model.num_stages:
            model.make_parallel()
    elif max(groups.dims.pipeline, groups.dims.tensor) > 1:
        marks = map(sharding_of, model.parameters())
        # the tensor-parallel size determines the ranks of the experts
        whole = groups.dims.expert == 1 and not any(mark.axes or mark.partial for mark in marks)
        init_parallel(groups.dims.resized(pipeline=1, tensor=1 if whole else groups.dims.tensor))


def _topology_of(num_stages: int, world: int) -> ProcessTopology:
    """Return the topology of ``world`` ranks in pipelines of ``num_stages``, with the job's
    tensor-parallel ranks as its last axis.
    """
    groups = get_parallel()
    tensor = 1 if groups is None else groups.dims.tensor
    if world % (num_stages * tensor):
        beside = f" with {tensor} tensor-parallel ranks each" if tensor > 1 else ""
        raise ConfigError(
            f"num_stages is {num_stages}{beside}, which does not divide the {world} ranks that "
            "were started; choose a divisor, or start other ranks"
        )
    data = world // num_stages // tensor
    if tensor == 1:
        return PipeDataParallelTopology(num_stages, data)
    return PipeModelDataParallelTopology(num_stages, tensor, data)


def _dims_of(topology: ProcessTopology) -> ParallelDims:
    """Return the mesh dimensions of a job with the pipelines of ``topology``. Raises ConfigError
    for axes in another order, and if the job is already parallel in another way.
    """
    if topology.axes not in (["pipe", "data"], ["pipe", "data", "model"]):
        raise ConfigError(
            f"the axes of the topology are {topology.axes}; ranks are numbered by "
            '["pipe", "data"] or ["pipe", "data", "model"], the last of which has neighbors'
        )
    tensor = max(1, topology.get_dim("model"))
    dims = ParallelDims.over(
        topology.world_size(), tensor=tensor, pipeline=topology.get_dim("pipe")
    )
    groups = get_parallel()
    # Stages may be added to tensor parallelism: its ranks are neighbors with and without stages.
    if groups is None or groups.dims in (dims, ParallelDims.over(dims.world, tensor=tensor)):
        return dims
    if max(groups.dims.sequence_context, groups.dims.expert) > 1:
        raise ConfigError(
            f"the job is parallel as {groups.dims}: sequences in parts and experts on several "
            "ranks are not built beside the stages of a pipeline; leave hf_zero.sequence_parallel "
            "and ep_size out, or train the whole model without stages"
        )
    raise ConfigError(
        f"the job is parallel as {groups.dims}, and the pipeline's topology is {topology}; the "
        "number of stages stays for the life of the processes, after engine.destroy() too: "
        "start new ones for another, and split layers (hf_zero.tensor_parallel) before stages"
    )


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
