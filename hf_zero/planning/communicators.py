"""Communicators that a job makes on the device, one rank's: each takes memory there that neither
torch nor this model of bytes sees.

How much that is depends on NCCL's version, channels and links. No figure has been measured here;
users report 0.5 to 0.7 GB for one on some machines, which :data:`REPORTED` repeats.
"""

from __future__ import annotations

from collections.abc import Iterable

from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.logging import in_units
from hf_zero.planning.plan import MemoryPlan

REPORTED = (500_000_000, 700_000_000)  # bytes of one, as users report of some machines


def communicators(cuts: Iterable[tuple[str, ...]], plan: MemoryPlan) -> dict[str, int]:
    """The communicators of a rank, at most, by what they are for; ``cuts``: by which axes flat
    buffers are cut beside ZeRO.

    Of a pipeline, two for each set of stages that tie weights come to these.
    """
    dims = ParallelDims.over(
        plan.ranks * plan.pipeline,
        tensor=plan.tensor,
        sequence=plan.sequence,
        expert=plan.expert,
        pipeline=plan.pipeline,
    )
    found = {"all ranks": int(dims.world > 1)}
    for axis in ("tensor", "sequence", "expert", "pipeline"):
        found[f"{axis} parallelism"] = int(dims.size(axis) > 1)
    found["messages between stages"] = int(dims.pipeline > 1)
    for axes in sorted({(), *cuts}):
        of = f" of {'- and '.join(axes)}-parallel parts" if axes else ""
        sharing = len(dims.ranks_sharing(0, axes))
        shards = plan.shards if not axes else sharing if plan.shards > 1 else 1
        sharded = shards > 1
        found[f"gathers and reductions{of}"] = 2 * sharded
        found[f"sums over replicas{of}"] = 2 * (sharing > shards)
        found[f"first values{of}"] = int(1 < sharing < dims.world)
        updates = plan.optimizer.on and plan.policy.gathers_after_step
        found[f"gathers of updates{of}"] = int(sharded and updates)
        in_node = plan.policy.shards_parameters and sharded and not axes
        found["gathers in a node"] = int(in_node and plan.node > 1)
        found["gathers in two hops"] = 2 * (in_node and plan.hops)
        if not axes and dims.splits_model:
            found["sums over all ranks"] = 2 * (sharing > shards)
    return {name: count for name, count in found.items() if count}


def allowance(count: int) -> str:
    """What to leave to ``count`` communicators, in words."""
    least, most = (in_units(count * each) for each in REPORTED)
    return (
        f"{count} NCCL communicator{'s' if count > 1 else ''} of a GPU's rank "
        f"{'are' if count > 1 else 'is'} not counted: users report 0.5 to 0.7 GB each on some "
        f"machines (here {least} to {most}), which was not measured"
    )
