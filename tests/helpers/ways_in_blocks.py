"""Blocks that do not just map one tensor to another: inputs changed in place, results that leave
another way than by return.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.helpers.models import features, seeded
from tests.helpers.training import At, Driver, Job


class _Blocks(nn.Module):
    """An input layer and four blocks over [rows, 8]; :meth:`body` calls them."""

    block: type[nn.Module]

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(7, 8)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.enter(x))


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = nn.Linear(8, 8), nn.Linear(8, 8)


class _Job(Job):
    model: type[nn.Module]

    def build(self) -> nn.Module:
        return seeded(self.model)

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        return net(features(at.step, at.micro, at.rank).to(net.dtype)).float().pow(2).mean()


class OneOfTwoInPlace(_Job):
    name = "a block with two inputs that changes one in place"

    class model(_Blocks):
        class block(_Layers):
            def forward(
                self, x: torch.Tensor, y: torch.Tensor
            ) -> tuple[torch.Tensor, torch.Tensor]:
                z = torch.tanh(self.main(y))
                x.add_(self.side(y))
                return torch.tanh(x) * 1.0, z

        def body(self, x: torch.Tensor) -> torch.Tensor:
            x, y = x * 1.0, x * 2.0
            for block in self.blocks:
                x, y = block(x, y)
            return x + y


class BothInPlace(_Job):
    name = "a block that changes both inputs in place, first of all, and returns nothing"

    class model(_Blocks):
        class block(_Layers):
            def forward(self, x: torch.Tensor, y: torch.Tensor) -> None:
                x += 1.0
                y *= 0.5
                x += torch.tanh(self.main(y * 1.0))
                y += torch.tanh(self.side(x * 1.0))

        def body(self, x: torch.Tensor) -> torch.Tensor:
            x, y = x * 1.0, x * 2.0
            for block in self.blocks:
                block(x, y)
            return x + y


class ThreeInputs(_Job):
    name = "blocks with three inputs of which some have no part in the loss"

    class model(_Blocks):
        class block(_Layers):
            def forward(
                self, x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor
            ) -> tuple[torch.Tensor, torch.Tensor]:
                return x + torch.tanh(self.main(x)) * scale, self.side(y)

        def body(self, x: torch.Tensor) -> torch.Tensor:
            y, scale = x * 2.0, x.mean(1, keepdim=True)
            for block in self.blocks:
                x, y = block(x, y, scale)
            return x


class IntoDict(_Job):
    name = "a block whose result goes into a dict"

    class model(_Blocks):
        class block(_Layers):
            def forward(self, state: dict[str, torch.Tensor]) -> None:
                state["x"] = state["x"] + self.side(torch.tanh(self.main(state["x"])))

        def body(self, x: torch.Tensor) -> torch.Tensor:
            state = {"x": x}
            for block in self.blocks:
                block(state)
            return state["x"]


class OntoSelf(_Job):
    name = "a block whose result is an attribute of it, and what it returns is detached"

    class model(_Blocks):
        class block(_Layers):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.result = x + self.side(torch.tanh(self.main(x)))
                return self.result.detach()

        def body(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                block(x)
                x = block.__dict__.pop("result")
            return x


class NoInput(_Job):
    name = "a block without inputs whose result is an attribute"

    class model(_Blocks):
        class block(_Layers):
            def forward(self) -> None:
                self.result = torch.tanh(self.main.weight @ self.side.weight)

        def body(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                block()
                x = x @ block.__dict__.pop("result")
            return x


class SideLoss(_Job):
    name = "blocks that keep a loss of their own on themselves"

    class model(_Blocks):
        class block(_Layers):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                out = x + torch.tanh(self.main(x))
                self.loss = self.side(x).pow(2).mean()  # recorded after what is returned
                return out

        def body(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x + sum(block.__dict__.pop("loss") for block in self.blocks)


def ways() -> list[Any]:
    return [
        OneOfTwoInPlace(),
        BothInPlace(),
        ThreeInputs(),
        IntoDict(),
        OntoSelf(),
        NoInput(),
        SideLoss(),
    ]
