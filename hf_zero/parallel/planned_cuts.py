"""The cuts of tensor and expert parallelism that the plan of an engine foresees, computed without
changing the model and without a process group. ``tensor_parallel`` and ``spread_experts`` make the
same cuts (``cuts_of``, ``cuts_of_experts``).
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.parallel.expert.model import cuts_of_experts, experts_of_layers, refuse_adapters
from hf_zero.parallel.tensor import cuts_of
from hf_zero.zero.layout.sharding import Sharding, sharding_of


def planned_dims(model: nn.Module, dims: ParallelDims) -> ParallelDims:
    """Return ``dims`` with the expert-parallel size that MoE layers of ``model`` ask for."""
    sizes = experts_of_layers(model).values()
    return replace(dims, expert=max(sizes)) if sizes else dims


def planned_cuts(
    model: nn.Module, tensor: int, expert: int, dims: ParallelDims, rank: int = 0
) -> dict[nn.Parameter, Sharding]:
    """Return the sharding on ``rank`` of each parameter of ``model`` that is still to be cut.

    Args:
        model: left unchanged.
        tensor: ranks that share each layer.
        expert: ranks that hold one set of a mixture's experts together.
        dims: the sizes of the axes of the job.

    Raises:
        ConfigError: as :func:`hf_zero.tensor_parallel` and :func:`hf_zero.expert_parallel` do.
    """
    cuts = cuts_of(model, tensor, dims.coordinate(rank, "tensor"))
    refuse_adapters(model, spreads=False)
    if expert > 1:
        cuts |= cuts_of_experts(model, dims.coordinate(rank, "expert"), expert, cuts)
    for parameter in experts_of_layers(model):
        sharding = cuts.get(parameter, sharding_of(parameter))
        if "expert" not in sharding.axes:
            cuts[parameter] = replace(sharding, axes=tuple(sorted({*sharding.axes, "expert"})))
    return cuts
