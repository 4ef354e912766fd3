"""Ways whose parameters are odd: tied, unused, used by some ranks, in groups, of no dimension,
of no element.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

import hf_zero
from tests.helpers.models import ARCHITECTURES, HIDDEN, Stack, features, seeded
from tests.helpers.training import ArchitectureJob, At, Driver, Job, plain_sgd, trainable
from tests.helpers.ways_checkpointed import StackJob


class _OddShapes(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))  # no dimension
        self.nothing = nn.Parameter(torch.empty(0, 4))  # no element
        self.three = nn.Parameter(torch.randn(3))  # fewer elements than ranks
        self.turned = nn.Parameter(torch.randn(HIDDEN, HIDDEN).t())  # not contiguous

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = super().body(x) @ self.turned
        return x * self.temperature + self.three.sum() + self.nothing.sum()


class NoDimensionNoElement(StackJob):
    name = "parameters of no dimension, of no element, of fewer elements than ranks, not contiguous"
    model = _OddShapes


class _OwnScalars(nn.Module):
    """A block whose scalar and empty parameters are its own, used in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gate = nn.Parameter(torch.tensor(1.3))
        self.none = nn.Parameter(torch.empty(2, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate * torch.tanh(self.linear(x)) + self.none.sum()


class _Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(7, 8)
        self.blocks = nn.ModuleList(_OwnScalars() for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x * self.scale


class ScalarsInBlocks(StackJob):
    name = "parameters of no dimension and of no element inside blocks"
    model = _Scalars


class _Skipping(Stack):
    """Leaves out one block, chosen by the caller."""

    def forward(self, x: torch.Tensor, skip: Sequence[int] = ()) -> torch.Tensor:
        x = self.enter(x)
        for index, block in enumerate(self.blocks):
            if index not in skip:
                x = block(x)
        return self.head(x)


class _SkipJob(StackJob):
    model = _Skipping

    def skipped(self, at: At) -> Sequence[int]:
        raise NotImplementedError

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        return (
            net(features(at.step, at.micro, at.rank).to(net.dtype), skip=self.skipped(at))
            .float()
            .pow(2)
            .mean()
        )


class OneRankOnly(_SkipJob):
    name = "a block used on rank 1 only (unused anywhere on one rank)"

    def skipped(self, at: At) -> Sequence[int]:
        return () if at.rank == 1 else (1,)


class EachRankSkipsAnother(_SkipJob):
    name = "each rank skips another block, by step"

    def skipped(self, at: At) -> Sequence[int]:
        return ((at.rank + at.step + at.micro) % 4,)


class OneRankOnlyInOneMicroBatch(_SkipJob):
    name = "a block used on rank 0 only, in the last step only"

    def skipped(self, at: At) -> Sequence[int]:
        return () if at.rank == 0 and at.step == 2 else (2,)


class OneRankSkipsHalf(_SkipJob):
    """Deep enough that a bounded number of messages in flight cannot hide a wrong order of
    waiting.
    """

    name = "every other one of nine blocks used on rank 1 only"

    def build(self) -> nn.Module:
        return seeded(lambda: _Skipping(depth=9))

    def skipped(self, at: At) -> Sequence[int]:
        return () if at.rank == 1 else (1, 3, 5, 7)


class UnusedEverywhere(_SkipJob):
    name = "a block unused everywhere: decay and moments advance"

    def skipped(self, at: At) -> Sequence[int]:
        return (1,) if at.step > 0 else ()


class NeverUsed(_SkipJob):
    name = "a block never used"

    def skipped(self, at: At) -> Sequence[int]:
        return (2,)


class PartlyUsed(StackJob):
    name = "a parameter of a used block that gets no gradient"

    class model(Stack):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block.spare = nn.Parameter(torch.ones(5))


class NoGradBranch(StackJob):
    name = "a block run under no_grad inside the forward, its output used as a constant"

    class model(Stack):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](x)
            with torch.no_grad():
                target = self.blocks[1](x)
            return self.blocks[2](x) - target


class Parametrized(StackJob):
    name = "weight_norm inside blocks and in the head"

    class model(Stack):
        def __init__(self) -> None:
            super().__init__()
            for module in (self.blocks[0].up, self.blocks[1].down, self.head):
                nn.utils.parametrizations.weight_norm(module)


class Convolutional(StackJob):
    name = "convolutions in channels_last, batch of images"

    class model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(1, 6, 3, padding=1)
            self.blocks = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(3))
            self.to(memory_format=torch.channels_last)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x[:, None, :, None].expand(-1, 1, 7, 5))
            for block in self.blocks:
                x = x + torch.tanh(block(x))
            return x


class Groups(ArchitectureJob):
    name = "three optimizer groups: decay, no decay, another learning rate, and one empty"

    def __init__(self) -> None:
        super().__init__(ARCHITECTURES["bert"])
        self.name = type(self).name

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        head = [p for name, p in named if name.startswith("cls")]
        bare = [
            p
            for name, p in named
            if not name.startswith("cls") and (name.endswith("bias") or "LayerNorm" in name)
        ]
        rest = [p for name, p in named if not any(p is other for other in head + bare)]
        groups = [
            {"params": rest, "weight_decay": 0.1},
            {"params": bare, "weight_decay": 0.0},
            {"params": head, "lr": 5e-3, "betas": (0.8, 0.95)},
            {"params": []},
        ]
        return torch.optim.AdamW(groups, lr=1e-3, eps=1e-6)


class SomeTrained(StackJob):
    name = "an optimizer that holds half of the trainable parameters"

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        chosen = [*model.blocks[0].parameters(), *model.blocks[2].parameters()]
        for p in model.parameters():
            p.requires_grad_(any(p is other for other in chosen))
        return torch.optim.SGD(chosen, lr=0.05)


class _TiedBlocks(Stack):
    """The first linear layer of block 2 is that of block 0, and the head's bias is the
    entrance's of another unit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up = self.blocks[0].up
        self.blocks[1].down.bias = self.enter.bias


class TiedAcrossBlocks(StackJob):
    name = "weights tied across blocks, and a block's to the root's"
    model = _TiedBlocks

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return plain_sgd(model)


class UsedOutside(StackJob):
    name = "a parameter of one block used by another module, unknown to it"

    class model(Stack):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](x) * self.blocks[2].up.bias.mean()
            return self.blocks[2](self.blocks[1](x)) + self.blocks[0].down.bias


class UsedOutsideByTwo(UsedOutside):
    name = "such a parameter in two forwards with their backwards after an evaluation"

    def micro(self, net: Driver, at: At) -> torch.Tensor:
        first = self.loss(net, at)
        second = self.loss(net, At(at.step, at.micro + 40, at.rank))
        with torch.no_grad():
            assert torch.isfinite(self.loss(net, At(at.step, at.micro + 60, at.rank)))
        net.backward(first)
        net.backward(second)
        return first + second


class Regularised(StackJob):
    """Values computed from gathered weights go backward after the weights are sharded again."""

    name = "a penalty on weights, computed inside GatheredParameters"

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        loss = super().loss(net, at)
        chosen = [*net.module.blocks[1].parameters(), net.module.head.weight]
        with hf_zero.GatheredParameters(chosen):
            penalty = torch.stack([p.float().pow(2).sum() for p in chosen]).sum()
        return loss + 0.01 * penalty


class RegularisedBefore(Regularised):
    name = "such a penalty, computed before the forward"

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        with hf_zero.GatheredParameters(list(net.module.parameters())):
            penalty = net.module.blocks[2].up.weight.float().square().sum()
        return StackJob.loss(self, net, at) + 0.01 * penalty


class ManySmall(StackJob):
    name = "SGD with momentum, nesterov, over many small parameters"

    class model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(7, 7, bias=i % 2 == 0) for i in range(9))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x)) + x
            return x

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            trainable(model), lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01
        )


def ways() -> list[Job]:
    kinds = (
        NoDimensionNoElement, ScalarsInBlocks, OneRankOnly, EachRankSkipsAnother,
        OneRankOnlyInOneMicroBatch, OneRankSkipsHalf, UnusedEverywhere,
        NeverUsed, PartlyUsed, NoGradBranch, Parametrized, Convolutional, Groups, SomeTrained,
        TiedAcrossBlocks, UsedOutside,
        UsedOutsideByTwo, Regularised, RegularisedBefore, ManySmall,
    )  # fmt: skip
    return [kind() for kind in kinds]
