"""Ways whose models are odd: parameters tied, unused, used by some ranks, in groups, frozen, of no
dimension, of no element; blocks that change inputs in place, or whose results leave another way
than by return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import hf_zero
from tests.helpers.models import ARCHITECTURES, HIDDEN, Stack, features
from tests.helpers.training import (
    At,
    Driver,
    Job,
    Way,
    own_loss,
    plain_sgd,
    squared_output,
    trainable,
)
from tests.helpers.ways_called import later, stack_of

BUILT: list[Job] = []


def way(name: str, **more: Any) -> Callable[[Any], Any]:
    """Add the way of a model, of the class that this decorates."""

    def add(model: Any) -> Any:
        BUILT.append(Way(name, model, **more))
        return model

    return add


class Blocks(nn.Module):
    """An input layer and ``depth`` blocks over [rows, 8]; ``body`` calls them in a row, unless a
    subclass says otherwise.
    """

    block: type[nn.Module]
    depth = 4

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(7, 8)
        self.blocks = nn.ModuleList(self.block() for _ in range(self.depth))

    def body(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.enter(x))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = nn.Linear(8, 8), nn.Linear(8, 8)


@dataclass
class Nested:
    hidden: dict[str, Any]
    note: str


class NestedBlock(nn.Module):
    """Takes and returns a dataclass holding a dict holding a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, state: Nested) -> Nested:
        a, (b, extra) = state.hidden["a"], state.hidden["rest"]
        rest = b + torch.tanh(self.right(a)), extra
        return Nested({"a": a + torch.tanh(self.left(b)), "rest": rest}, state.note + ".")


def nested_loss(net: Driver, at: At) -> torch.Tensor:
    x = {"features": features(at.step, at.micro, at.rank).to(net.dtype)}
    state = net(inputs={"x": x, "unused": [1, "two"]})
    assert state.note == "..."
    return (state.hidden["a"] * state.hidden["rest"][0]).float().pow(2).mean()


@way("dicts, tuples and dataclasses in and out", loss_of=nested_loss)
class NestedModel(Blocks):
    block, depth = NestedBlock, 3

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(7, 12)

    def forward(self, *, inputs: dict[str, Any]) -> Nested:  # type: ignore[override]
        a, b = self.enter(inputs["x"]["features"]).split(6, dim=-1)
        return self.body(Nested({"a": a, "rest": (b, None)}, ""))


@way("blocks that change their input in place")
class InPlace(Stack):
    def __init__(self) -> None:
        super().__init__()
        for index, block in enumerate(self.blocks):
            self.blocks[index] = nn.Sequential(nn.ReLU(inplace=True), block)

    def body(self, x):
        for block in self.blocks:
            x = block(x)
            x += 1.0
        return x


@way("outputs that are used late, or never")
class ManyOutputs(Blocks):
    """Blocks return a tensor, one that only the next but one block uses, and one for nobody."""

    class block(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.idle = nn.Linear(8, 8)

        def forward(self, x, side):
            inner = self.main(x) if side is None else self.main(x) * side
            x = x + torch.tanh(inner)
            return x, self.side(x), self.idle(x)

    def body(self, x):
        sides: list[Any] = []
        for index, block in enumerate(self.blocks):
            x, side, _ = block(x, sides[index - 2] if index >= 2 else None)
            sides.append(side)
        return x + sides[0]


@way("frozen parameters inside blocks, and a block frozen whole")
def some_frozen():
    model = Stack()
    for block in model.blocks:
        block.up.weight.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    return model


class EightBit(nn.Module):
    """Frozen int8 weights with a trained scale, as in adapters over quantized models."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randint(-100, 100, (HIDDEN, HIDDEN), dtype=torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(torch.full((HIDDEN,), 0.01))

    def forward(self, x):
        return x + torch.tanh(x @ self.weight.to(x.dtype)) * self.scale


@way("frozen int8 weights beside trained scales")
class IntegerWeights(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(EightBit() for _ in range(3))


@way(
    "frozen embeddings and first layer: the first trained block gets an input without gradient",
    loss_of=own_loss("llama"),
)
def frozen_bottom():
    model: Any = ARCHITECTURES["llama"].make()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model


@way("only the embeddings trained, everything above frozen", loss_of=own_loss("llama"))
def frozen_top():
    model: Any = ARCHITECTURES["llama"].make()
    model.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(True)
    return model


@way("LoRA over frozen blocks", loss_of=own_loss("llama"))
def lora(checkpointing=False):
    import peft

    base: Any = ARCHITECTURES["llama"].make()
    if checkpointing:  # as TRL sets it up
        base.gradient_checkpointing_enable({"use_reentrant": True})
        base.enable_input_require_grads()
        base.config.use_cache = False
    chosen = {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0}
    config = peft.LoraConfig(r=3, lora_alpha=6, init_lora_weights=False, **chosen)
    return peft.get_peft_model(base, config)


way("LoRA over frozen blocks with reentrant checkpointing", loss_of=own_loss("llama"))(
    lambda: lora(checkpointing=True)
)


@way("parameters of no dimension, of no element, of fewer elements than ranks, not contiguous")
class OddShapes(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))  # no dimension
        self.nothing = nn.Parameter(torch.empty(0, 4))  # no element
        self.three = nn.Parameter(torch.randn(3))  # fewer elements than ranks
        self.turned = nn.Parameter(torch.randn(HIDDEN, HIDDEN).t())  # not contiguous

    def body(self, x):
        x = super().body(x) @ self.turned
        return x * self.temperature + self.three.sum() + self.nothing.sum()


@way("parameters of no dimension and of no element inside blocks")
class Scalars(Blocks):
    depth = 3

    class block(nn.Module):
        """Uses its own scalar and its own empty parameter."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.gate = nn.Parameter(torch.tensor(1.3))
            self.none = nn.Parameter(torch.empty(2, 0))

        def forward(self, x):
            return x + self.gate * torch.tanh(self.linear(x)) + self.none.sum()

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def body(self, x):
        return super().body(x) * self.scale


class Skipping(Stack):
    """Leaves out the blocks that the caller chooses."""

    def forward(self, x: torch.Tensor, skip: Sequence[int] = ()) -> torch.Tensor:
        x = self.enter(x)
        for index, block in enumerate(self.blocks):
            if index not in skip:
                x = block(x)
        return self.head(x)


def skipping(name: str, skipped: Callable[[At], Sequence[int]], depth: int = 3) -> None:
    def loss(net: Driver, at: At) -> torch.Tensor:
        x = features(at.step, at.micro, at.rank).to(net.dtype)
        return net(x, skip=skipped(at)).float().pow(2).mean()

    way(name, loss_of=loss)(lambda: Skipping(depth))


skipping(
    "a block used on rank 1 only (unused anywhere on one rank)",
    lambda at: () if at.rank == 1 else (1,),
)
skipping("each rank skips another block, by step", lambda at: ((at.rank + at.step + at.micro) % 4,))
skipping(
    "a block used on rank 0 only, in the last step only",
    lambda at: () if at.rank == 0 and at.step == 2 else (2,),
)
# deep enough that a bounded number of messages in flight cannot hide a wrong order of waiting
skipping(
    "every other one of nine blocks used on rank 1 only",
    lambda at: () if at.rank == 1 else (1, 3, 5, 7),
    depth=9,
)
skipping(
    "a block unused everywhere: decay and moments advance", lambda at: (1,) if at.step > 0 else ()
)
skipping("a block never used", lambda at: (2,))


@way("a parameter of a used block that gets no gradient")
class PartlyUsed(Stack):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.spare = nn.Parameter(torch.ones(5))


@way("a block run under no_grad inside the forward, its output used as a constant")
class NoGradBranch(Stack):
    def body(self, x):
        x = self.blocks[0](x)
        with torch.no_grad():
            target = self.blocks[1](x)
        return self.blocks[2](x) - target


@way("weight_norm inside blocks and in the head")
class Parametrized(Stack):
    def __init__(self) -> None:
        super().__init__()
        for module in (self.blocks[0].up, self.blocks[1].down, self.head):
            nn.utils.parametrizations.weight_norm(module)


@way("convolutions in channels_last, batch of images")
class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(3))
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        x = self.stem(x[:, None, :, None].expand(-1, 1, 7, 5))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def groups(model: nn.Module) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    head = {name for name in named if name.startswith("cls")}
    bare = {name for name in named if name.endswith("bias") or "LayerNorm" in name} - head
    rest = named.keys() - head - bare
    chosen = [[p for name, p in named.items() if name in each] for each in (rest, bare, head)]
    others: list[dict[str, Any]] = [
        {"weight_decay": 0.1},
        {"weight_decay": 0.0},
        {"lr": 5e-3, "betas": (0.8, 0.95)},
    ]
    made = [{"params": params, **more} for params, more in zip(chosen, others)]
    return torch.optim.AdamW([*made, {"params": []}], lr=1e-3, eps=1e-6)


way(
    "three optimizer groups: decay, no decay, another learning rate, and one empty",
    loss_of=own_loss("bert"),
    make_optimizer=groups,
)(ARCHITECTURES["bert"].make)


def half_of_them(model: Any) -> torch.optim.Optimizer:
    chosen = [*model.blocks[0].parameters(), *model.blocks[2].parameters()]
    for p in model.parameters():
        p.requires_grad_(any(p is other for other in chosen))
    return torch.optim.SGD(chosen, lr=0.05)


way("an optimizer that holds half of the trainable parameters", make_optimizer=half_of_them)(Stack)


@way("weights tied across blocks, and a block's to the root's", make_optimizer=plain_sgd)
class TiedBlocks(Stack):
    """The first linear layer of block 2 is that of block 0, and a bias of block 1 the entrance's,
    of another unit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up = self.blocks[0].up
        self.blocks[1].down.bias = self.enter.bias


def used_outside(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.blocks[0](x) * self.blocks[2].up.bias.mean()
    return self.blocks[2](self.blocks[1](x)) + self.blocks[0].down.bias


def two_at_once(net: Driver, at: At) -> torch.Tensor:
    first, second = squared_output(net, at), squared_output(net, later(at, 40))
    with torch.no_grad():
        assert torch.isfinite(squared_output(net, later(at, 60)))
    net.backward(first)
    net.backward(second)
    return first + second


way("a parameter of one block used by another module, unknown to it")(stack_of(used_outside))
way(
    "such a parameter in two forwards with their backwards after an evaluation",
    micro_of=two_at_once,
)(stack_of(used_outside))


def penalty_after(net: Driver, at: At) -> torch.Tensor:
    """Values computed from gathered weights go backward after the weights are sharded again."""
    loss = squared_output(net, at)
    chosen = [*net.module.blocks[1].parameters(), net.module.head.weight]
    with hf_zero.GatheredParameters(chosen):
        penalty = torch.stack([p.float().pow(2).sum() for p in chosen]).sum()
    return loss + 0.01 * penalty


def penalty_before(net: Driver, at: At) -> torch.Tensor:
    with hf_zero.GatheredParameters(list(net.module.parameters())):
        penalty = net.module.blocks[2].up.weight.float().square().sum()
    return squared_output(net, at) + 0.01 * penalty


way("a penalty on weights, computed inside GatheredParameters", loss_of=penalty_after)(Stack)
way("such a penalty, computed before the forward", loss_of=penalty_before)(Stack)


@way(
    "SGD with momentum, nesterov, over many small parameters",
    make_optimizer=lambda model: torch.optim.SGD(
        trainable(model), lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
)
class ManySmall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7, bias=i % 2 == 0) for i in range(9))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return x


@way("a block with two inputs that changes one in place")
class OneOfTwoInPlace(Blocks):
    class block(Layers):
        def forward(self, x, y):
            z = torch.tanh(self.main(y))
            x.add_(self.side(y))
            return torch.tanh(x) * 1.0, z

    def body(self, x):
        x, y = x * 1.0, x * 2.0
        for block in self.blocks:
            x, y = block(x, y)
        return x + y


@way("a block that changes both inputs in place, first of all, and returns nothing")
class BothInPlace(Blocks):
    class block(Layers):
        def forward(self, x, y):
            x += 1.0
            y *= 0.5
            x += torch.tanh(self.main(y * 1.0))
            y += torch.tanh(self.side(x * 1.0))

    def body(self, x):
        x, y = x * 1.0, x * 2.0
        for block in self.blocks:
            block(x, y)
        return x + y


@way("blocks with three inputs of which some have no part in the loss")
class ThreeInputs(Blocks):
    class block(Layers):
        def forward(self, x, y, scale):
            return x + torch.tanh(self.main(x)) * scale, self.side(y)

    def body(self, x):
        y, scale = x * 2.0, x.mean(1, keepdim=True)
        for block in self.blocks:
            x, y = block(x, y, scale)
        return x


@way("a block whose result goes into a dict")
class IntoDict(Blocks):
    class block(Layers):
        def forward(self, state):
            state["x"] = state["x"] + self.side(torch.tanh(self.main(state["x"])))

    def body(self, x):
        state = {"x": x}
        for block in self.blocks:
            block(state)
        return state["x"]


@way("a block whose result is an attribute of it, and what it returns is detached")
class OntoSelf(Blocks):
    class block(Layers):
        def forward(self, x):
            self.result = x + self.side(torch.tanh(self.main(x)))
            return self.result.detach()

    def body(self, x):
        for block in self.blocks:
            block(x)
            x = block.__dict__.pop("result")
        return x


@way("a block without inputs whose result is an attribute")
class NoInput(Blocks):
    class block(Layers):
        def forward(self):
            self.result = torch.tanh(self.main.weight @ self.side.weight)

    def body(self, x):
        for block in self.blocks:
            block()
            x = x @ block.__dict__.pop("result")
        return x


@way("blocks that keep a loss of their own on themselves")
class SideLoss(Blocks):
    class block(Layers):
        def forward(self, x):
            out = x + torch.tanh(self.main(x))
            self.loss = self.side(x).pow(2).mean()  # recorded after what is returned
            return out

    def body(self, x):
        for block in self.blocks:
            x = block(x)
        return x + sum(block.__dict__.pop("loss") for block in self.blocks)
