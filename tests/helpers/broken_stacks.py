"""Stacks in which something goes wrong when they are told to."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.models import Stack


class Bomb(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("user's own backward")


class Armed(Stack):
    """``at`` says where the forward or the backward breaks; "loss": the backward, before it comes
    to the model.
    """

    at = ""
    error: type[BaseException] = ArithmeticError  # of the forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return Bomb.apply(x) if self.at == "loss" else x

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index == 1 and self.at == "forward":
                raise self.error("user's own forward")
            if index == 1 and self.at == "backward":
                x = Bomb.apply(x)
            x = block(x)
        return x


class Latecomer(Stack):
    """When told to, it also uses a weight of a block at its very start: that gradient comes when
    the block's is gone.
    """

    late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        if self.late:
            x = x + self.blocks[2].down.bias.sum()
        return self.head(self.body(x))
