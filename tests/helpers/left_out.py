"""A stack of which ranks leave out blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tests.helpers.models import Stack, features, seeded
from tests.helpers.training import At, Driver, StackJob, trainable

Choose = Callable[[At], Collection[int]]


class Dropping(Stack):
    """A stack that runs the blocks in ``chosen``, each under a checkpoint if asked."""

    chosen: Any = ()
    checkpoints: bool | None = None

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.chosen:
            block = self.blocks[index]
            x = (
                block(x)
                if self.checkpoints is None
                else checkpoint(block, x, use_reentrant=self.checkpoints)
            )
        return x


class LeftOut(StackJob):
    """``choose(at)`` gives the blocks that a rank leaves out; ``explains(at)``: the gradient of the
    input is asked of the loss before its backward.
    """

    def __init__(
        self,
        depth: int,
        choose: Choose,
        checkpoints: bool | None = None,
        explains: Callable[[At], bool] = lambda at: False,
    ):
        self.depth, self.choose, self.checkpoints = depth, choose, checkpoints
        self.explains, self.name = explains, f"left out {id(self)}"

    def build(self) -> torch.nn.Module:
        model = seeded(lambda: Dropping(self.depth, 8))
        model.checkpoints = self.checkpoints
        return model

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        # small: 40 layers in a row multiply rounding with each step, by ten from 0.001 to 0.005
        return torch.optim.SGD(trainable(model), lr=0.001)

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        out = self.choose(at)
        net.module.chosen = [index for index in range(self.depth) if index not in out]
        x = features(at.step, at.micro, at.rank).to(net.dtype).requires_grad_(self.explains(at))
        loss: torch.Tensor = net(x).float().pow(2).mean()
        if self.explains(at):  # a number that is compared
            loss = loss + torch.autograd.grad(loss, x, retain_graph=True)[0].pow(2).sum()
        return loss


def at_random(depth: int, share: float) -> Choose:
    """Each rank leaves out its own ``share`` of the blocks in every micro-batch."""

    def choose(at: At) -> set[int]:
        draw = random.Random(f"{at.step} {at.micro} {at.rank}").random
        return {index for index in range(depth) if draw() < share}

    return choose


def first_used(rank: int, *blocks: int) -> Choose:
    """No rank uses ``blocks`` in the first step, ``rank`` alone does in the second, then all do."""
    return lambda at: set(blocks) if at.step == 0 or (at.step == 1 and at.rank != rank) else set()
