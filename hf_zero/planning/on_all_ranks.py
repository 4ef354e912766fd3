"""The preflight check on all ranks of the job together."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.distributed import process_group
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.distributed.world_group import get_world_group, raise_on_all_ranks
from hf_zero.logging import logger
from hf_zero.optim.elementwise import check as check_elementwise
from hf_zero.planning.checking import check, room_for
from hf_zero.planning.moments import moments_of


def check_on_all_ranks(
    model: nn.Module, config: ZeroConfig, optimizer: torch.optim.Optimizer | None
) -> None:
    """Refuse, on all ranks alike and before any memory is taken, a configuration that does not fit.
    Collective.

    Raises DoesNotFitError; in a pipeline, on the ranks of the stages that do not fit, and
    RankMismatchError on the others.
    """
    world, device = process_group.get_world_size(), process_group.default_device()
    groups = get_parallel()
    dims = ParallelDims(world) if groups is None else groups.dims
    free = room_for(model, config, device)
    if world > 1:
        every = get_world_group().all_gather_object(free.numbers(), "free memory")
        free = free.with_numbers([min(numbers) for numbers in zip(*every)])
    moments = None
    if optimizer is not None:
        check_elementwise(optimizer, config.elementwise_optimizers)
        moments = moments_of(optimizer)
    # Pipeline stages differ in their needs: if one does not fit, all ranks raise together.
    together = raise_on_all_ranks("fit its pipeline stage into its memory")
    with together if dims.pipeline > 1 else nullcontext():
        report = check(
            model,
            config,
            dims.in_a_stage,
            device=device,
            free=free,
            moments=moments,
            trains=optimizer is not None,
        )
    if process_group.get_rank() % dims.in_a_stage == 0:
        for line in filter(None, (report.warning, report.note)):
            logger.warning("%s", line)
