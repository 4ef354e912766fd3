"""The stage table: the state that each ZeRO stage shards, its bytes and its traffic (Rajbhandari et
al., arXiv 1910.02054).

A stage is a row of :data:`POLICIES`, and nothing in ``zero/`` branches on the stage number. Ranks
form a mesh of two axes: along the shard axis state is cut into shards, along the replicate axis it
is repeated. Stage 0 is the mesh whose shard axis is 1 long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
ADAM_MOMENTS = 2


@dataclass(frozen=True)
class Policy:
    """One stage's handling of parameters, gradients and optimizer state: False keeps them whole on
    every rank, True shards them.
    """

    stage: int
    shards_parameters: bool
    shards_gradients: bool
    shards_optimizer: bool

    def num_shards(self, world: int, replicas: int = 1) -> int:
        """Return the length of the shard axis for ``world`` ranks in ``replicas`` copies."""
        if world % replicas:
            raise ValueError(
                f"{world} ranks cannot be split into {replicas} equal replicas; choose a "
                "replicate_size that divides the ranks"
            )
        return world // replicas if self.shards_optimizer else 1

    def num_parameter_shards(self, num_shards: int) -> int:
        return num_shards if self.shards_parameters else 1

    @property
    def of_persistent(self) -> Policy:
        """The policy for parameters that stay whole between steps at a stage that shards others."""
        return replace(self, shards_parameters=False)

    @property
    def reduces_every_backward(self) -> bool:
        """Return whether each backward reduces, as sharded gradients cannot stay whole."""
        return self.shards_gradients

    @property
    def gathers_after_step(self) -> bool:
        """Return whether a step ends with all-gathers of the updated shards: parameters are whole,
        their optimizer state is sharded.
        """
        return self.shards_optimizer and not self.shards_parameters

    def bytes_per_parameter(
        self,
        num_shards: int,
        precision: str = "bfloat16",
        moments: int = ADAM_MOMENTS,
        gradient: str | None = None,
        keeps_shard: bool = False,
    ) -> dict[str, float]:
        """Return the bytes of state a rank holds per trainable parameter, between backward and
        step. ``keeps_shard``: sharded 16-bit parameters are kept beside the master weights, as in
        the paper; otherwise a gather casts these.

        ``precision`` and ``gradient`` are dtype names ("float32", "bfloat16", "float16");
        ``gradient`` defaults to float32, in which gradients are accumulated. In fp32 the parameters
        are their own master weights. The optimizer keeps ``moments`` fp32 numbers per parameter
        (Adam 2, SGD with momentum 1, plain SGD 0).
        """
        cut = float(num_shards)
        master = 0 if precision == "float32" else 4
        grad = ITEM_BYTES[gradient or "float32"]
        casts = self.shards_parameters and master > 0 and not keeps_shard
        nbytes = 0.0 if casts else float(ITEM_BYTES[precision])
        return {
            "parameters": nbytes / (cut if self.shards_parameters else 1.0),
            "gradients": grad / (cut if self.shards_gradients else 1.0),
            "optimizer": (master + 4 * moments) / (cut if self.shards_optimizer else 1.0),
        }

    def traffic(self, accumulation: int = 1) -> float:
        """Return the elements sent and received per step, in multiples of the number of parameters
        (large-N limit of (N-1)/N).

        An all-gather and a reduce-scatter count 1 each, an all-reduce 2. Activation checkpointing
        costs no further gather: the recomputation runs while the unit is gathered for its backward.
        """
        reduces = accumulation if self.reduces_every_backward else 1
        if self.shards_parameters:
            return 2.0 * accumulation + reduces
        return 1.0 + reduces


POLICIES: dict[int, Policy] = {
    0: Policy(0, shards_parameters=False, shards_gradients=False, shards_optimizer=False),
    1: Policy(1, shards_parameters=False, shards_gradients=False, shards_optimizer=True),
    2: Policy(2, shards_parameters=False, shards_gradients=True, shards_optimizer=True),
    3: Policy(3, shards_parameters=True, shards_gradients=True, shards_optimizer=True),
}


def bytes_per_parameter(
    stage: int,
    num_shards: int,
    precision: str = "bfloat16",
    moments: int = ADAM_MOMENTS,
    gradient: str | None = None,
    keeps_shard: bool = False,
) -> float:
    """Return the total of :meth:`Policy.bytes_per_parameter` for ``stage``."""
    parts = POLICIES[stage].bytes_per_parameter(
        num_shards, precision, moments, gradient, keeps_shard
    )
    return sum(parts.values())
