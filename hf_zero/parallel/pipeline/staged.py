"""Base of models that are cut into pipeline stages, with the methods that an engine calls; the
parallelism of a job with such a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from hf_zero.distributed import init, process_group
from hf_zero.distributed.parallel_dims import ParallelDims, check_size
from hf_zero.distributed.parallel_groups import get_parallel, init_parallel
from hf_zero.errors import ConfigError
from hf_zero.parallel.pipeline.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from hf_zero.zero.layout.sharding import sharding_of
from hf_zero.zero.layout.walk import StagedModel


class StagedModule(StagedModel):
    """The stages that this rank holds: ``stages_per_rank`` of the ``stages_per_rank * num_stages``
    stages of a pipeline. A sample passes ``num_stages`` ranks. Stage k is on the rank at ``k %
    num_stages`` of the axis "pipe" of ``topology``.
    """

    # set by ``mark_tied``: names that only other stages hold, and the stages of each tied parameter
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
