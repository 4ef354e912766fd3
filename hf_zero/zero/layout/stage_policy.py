"""The stage table: the state that each ZeRO stage shards (Rajbhandari et al., arXiv 1910.02054).

A stage is a row of :data:`POLICIES`, and no code of a pass branches on the stage number. Ranks
form a mesh of two dimensions: along the shard dimension state is cut into shards, along the
replicate dimension it is repeated. Stage 0 is the mesh whose shard dimension is 1 long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class StagePolicy:
    """One stage's handling of parameters, gradients and optimizer state: False keeps them whole on
    every rank, True shards them.
    """

    stage: int
    shards_parameters: bool
    shards_gradients: bool
    shards_optimizer: bool

    def num_shards(self, world: int, replicas: int = 1) -> int:
        """Return the length of the shard dimension for ``world`` ranks in ``replicas`` copies."""
        if world % replicas:
            raise ValueError(
                f"{world} ranks cannot be split into {replicas} equal replicas; choose a "
                "replicate_size that divides the ranks"
            )
        return world // replicas if self.shards_optimizer else 1

    def num_parameter_shards(self, num_shards: int) -> int:
        return num_shards if self.shards_parameters else 1

    @property
    def for_persistent(self) -> StagePolicy:
        """The policy for parameters that stay whole between steps at a stage that shards others."""
        return replace(self, shards_parameters=False)

    @property
    def gathers_after_step(self) -> bool:
        """Return whether a step ends with all-gathers of the updated shards: parameters are whole,
        their optimizer state is sharded.
        """
        return self.shards_optimizer and not self.shards_parameters


POLICIES: dict[int, StagePolicy] = {
    0: StagePolicy(0, shards_parameters=False, shards_gradients=False, shards_optimizer=False),
    1: StagePolicy(1, shards_parameters=False, shards_gradients=False, shards_optimizer=True),
    2: StagePolicy(2, shards_parameters=False, shards_gradients=True, shards_optimizer=True),
    3: StagePolicy(3, shards_parameters=True, shards_gradients=True, shards_optimizer=True),
}
