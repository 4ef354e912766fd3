"""The bytes and the traffic of each ZeRO stage, by the formulas of the paper (Rajbhandari et al.,
arXiv 1910.02054).
"""

from __future__ import annotations

from hf_zero.zero.layout.stage_policy import POLICIES

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def bytes_by_kind(
    stage: int,
    num_shards: int,
    precision: str = "bfloat16",
    moments: int = 2,
    gradient: str = "float32",
    keeps_shard: bool = False,
) -> dict[str, float]:
    """Return the bytes of state a rank holds per trainable parameter, between backward and step.
    ``keeps_shard``: sharded 16-bit parameters are kept beside the master weights, as in the paper;
    otherwise a gather casts these.

    In fp32 the parameters are their own master weights. The optimizer keeps ``moments`` fp32
    numbers per parameter (Adam 2, SGD with momentum 1, plain SGD 0).
    """
    policy, cut = POLICIES[stage], float(num_shards)
    master = 0 if precision == "float32" else 4
    casts = policy.shards_parameters and master > 0 and not keeps_shard
    nbytes = 0.0 if casts else float(ITEM_BYTES[precision])
    return {
        "parameters": nbytes / (cut if policy.shards_parameters else 1.0),
        "gradients": ITEM_BYTES[gradient] / (cut if policy.shards_gradients else 1.0),
        "optimizer": (master + 4 * moments) / (cut if policy.shards_optimizer else 1.0),
    }


def traffic(stage: int, accumulation: int = 1) -> float:
    """Return the elements sent and received per step, in multiples of the number of parameters
    (large-N limit of (N-1)/N).

    An all-gather and a reduce-scatter count 1 each, an all-reduce 2. Activation checkpointing costs
    no further gather: the recomputation runs while the unit is gathered for its backward.
    """
    policy = POLICIES[stage]
    reduces = accumulation if policy.shards_gradients else 1
    if policy.shards_parameters:
        return 2.0 * accumulation + reduces
    return 1.0 + reduces
