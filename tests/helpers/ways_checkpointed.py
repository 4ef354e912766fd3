"""Ways with activation checkpointing: each recomputes a forward inside the backward, by another
road.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.models import ARCHITECTURES, Stack, features, seeded
from tests.helpers.training import ArchitectureJob, At, Driver, Job


class StackJob(Job):
    """A :class:`Stack` (or a subclass named by ``model``) on random features, squared error
    against zero.
    """

    model: type[nn.Module] = Stack

    def build(self) -> nn.Module:
        return seeded(self.model)

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        return net(features(at.step, at.micro, at.rank).to(net.dtype)).float().pow(2).mean()


class TransformersCheckpointing(ArchitectureJob):
    def __init__(self, architecture: str, use_reentrant: bool) -> None:
        super().__init__(ARCHITECTURES[architecture])
        self.use_reentrant = use_reentrant
        self.name = f"gradient_checkpointing_enable({use_reentrant=}) on {architecture}"

    def build(self) -> nn.Module:
        model = super().build()
        model.gradient_checkpointing_enable({"use_reentrant": self.use_reentrant})
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False
        return model


class _CheckpointedBlocks(Stack):
    use_reentrant = False

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class _ReentrantBlocks(_CheckpointedBlocks):
    use_reentrant = True


class NonReentrantAround(StackJob):
    name = "non-reentrant checkpoint around each block"
    model = _CheckpointedBlocks


class ReentrantAround(StackJob):
    name = "reentrant checkpoint around each block"
    model = _ReentrantBlocks


class _SomeBlocksCheckpointed(Stack):
    use_reentrant = False

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        x = checkpoint(
            lambda y: self.blocks[2](self.blocks[1](y)), x, use_reentrant=self.use_reentrant
        )
        return self.blocks[0](x)


class _SomeBlocksReentrant(_SomeBlocksCheckpointed):
    use_reentrant = True


class NonReentrantAroundTwo(StackJob):
    name = "non-reentrant checkpoint around two blocks, another block before and after"
    model = _SomeBlocksCheckpointed


class ReentrantAroundTwo(StackJob):
    name = "reentrant checkpoint around two blocks, another block before and after"
    model = _SomeBlocksReentrant


class _CheckpointedTwice(Stack):
    """The same block in two checkpoints."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, self.blocks[0]):
            x = checkpoint(block, x, use_reentrant=False)
        return x


class CheckpointedTwice(StackJob):
    name = "a block called twice, each time under a checkpoint"
    model = _CheckpointedTwice


class _NestedCheckpoints(Stack):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        def inner(y: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.blocks[1], self.blocks[0](y), use_reentrant=False)

        return self.blocks[2](checkpoint(inner, x, use_reentrant=False))


class NestedCheckpoints(StackJob):
    name = "a checkpoint inside a checkpoint"
    model = _NestedCheckpoints


def ways() -> list[Job]:
    transformers_ways = [
        TransformersCheckpointing(name, reentrant)
        for name in ("bert", "t5")
        for reentrant in (False, True)
    ]
    own = (
        NonReentrantAround,
        ReentrantAround,
        NonReentrantAroundTwo,
        ReentrantAroundTwo,
        CheckpointedTwice,
        NestedCheckpoints,
    )
    return [*transformers_ways, *(kind() for kind in own)]
