"""Ways of calling a model that a counter of forwards gets wrong: twice, in part, in vain, in
between, by another door.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.helpers.models import ARCHITECTURES, Stack, features, seeded, tokens
from tests.helpers.training import ArchitectureJob, At, Driver, Job
from tests.helpers.ways_checkpointed import StackJob


class _Reused(Stack):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        for index in (0, 1, 0, 2, 0):
            x = self.blocks[index](x)
        return x


class CalledTwice(StackJob):
    name = "a block called three times, with others in between"
    model = _Reused


class TwoForwards(StackJob):
    name = "two forwards before one backward"

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        first = super().loss(net, at)
        second = super().loss(net, At(at.step, at.micro + 40, at.rank))
        return first + 0.5 * second


class TwoForwardsOneUsed(ArchitectureJob):
    name = "a forward whose output is dropped at once"

    def __init__(self) -> None:
        super().__init__(ARCHITECTURES["gpt2"])
        self.name = type(self).name

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        net(**self.batch(At(at.step, at.micro + 40, at.rank)))
        return super().loss(net, at)


class DroppedLater(StackJob):
    name = "a forward that is dropped during the next window"

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        loss = super().loss(net, at)
        net.memory["unused"] = super().loss(net, At(at.step, at.micro + 40, at.rank))
        return loss


class KeptLoss(StackJob):
    name = "losses kept with their graphs"

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        loss = super().loss(net, at)
        net.memory.setdefault("losses", []).append(loss)
        return loss


class KeptOutput(ArchitectureJob):
    name = "outputs with hidden states kept over steps"

    def __init__(self) -> None:
        super().__init__(ARCHITECTURES["bert"])
        self.name = type(self).name

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        output = net(**self.batch(at), output_hidden_states=True)
        net.memory.setdefault("outputs", []).append(output)
        return output.loss


class Interleaved(StackJob):
    name = "all forwards of a window, then all backwards in reverse"

    def window(
        self, net: Driver, at: Sequence[At], end_micro: Callable[[], None]
    ) -> list[torch.Tensor]:
        losses = [self.loss(net, each) for each in at]
        for loss in reversed(losses):
            net.backward(loss)
            end_micro()
        return losses


class Evaluated(ArchitectureJob):
    """Evaluation of other data before each micro-batch, and once more between its forward and
    its backward.
    """

    def __init__(self, name: str, guard: Callable[[], Any], architecture: str = "bert") -> None:
        super().__init__(ARCHITECTURES[architecture])
        self.name, self.guard = name, guard

    def look(self, net: Driver, at: At) -> None:
        net.module.eval()
        with self.guard():
            value = net(**self.batch(At(at.step, at.micro + 60, at.rank))).loss
        assert torch.isfinite(value), f"evaluation at {at} gave {value}"
        net.module.train()

    def micro(self, net: Driver, at: At) -> torch.Tensor:
        self.look(net, at)
        loss = self.loss(net, at)
        self.look(net, at)
        net.backward(loss)
        return loss


class Generated(ArchitectureJob):
    name = "generate between micro-batches"

    def __init__(self) -> None:
        super().__init__(ARCHITECTURES["gpt2"])
        self.name = type(self).name

    def micro(self, net: Driver, at: At) -> torch.Tensor:
        net.module.eval()
        prompt = tokens(at.step, at.micro, 0)[:, :4]
        made = net.module.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=3,
            min_new_tokens=3,
            do_sample=False,
        )
        assert made.shape == (2, 7)
        net.module.train()
        return super().micro(net, at)


class GradientsOfInputs(StackJob):
    """Adversarial training and gradient penalties look at the gradient of the input before the
    backward proper.
    """

    name = "autograd.grad of the input, then the backward of the same graph"

    def micro(self, net: Driver, at: At) -> torch.Tensor:
        x = features(at.step, at.micro, at.rank).to(net.dtype).requires_grad_()
        loss = net(x).float().pow(2).mean()
        (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
        assert slope.shape == x.shape and bool(slope.any())
        net.backward(loss)
        return loss


class InPlace(StackJob):
    name = "blocks that change their input in place"

    class model(Stack):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
                x += 1.0
            return x

        def __init__(self) -> None:
            super().__init__()
            for index, block in enumerate(self.blocks):
                self.blocks[index] = nn.Sequential(nn.ReLU(inplace=True), block)


class ManyOutputs(Job):
    """Blocks return a tensor, a tensor that nobody uses and one that only the next but one block
    uses.
    """

    name = "outputs that are used late, or never"

    class model(nn.Module):
        class Piece(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.main, self.side, self.idle = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

            def forward(
                self, x: torch.Tensor, side: torch.Tensor | None
            ) -> tuple[torch.Tensor, ...]:
                x = (
                    x + torch.tanh(self.main(x))
                    if side is None
                    else x + torch.tanh(self.main(x) * side)
                )
                return x, self.side(x), self.idle(x)

        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Linear(7, 8)
            self.blocks = nn.ModuleList(self.Piece() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, sides = self.enter(x), []
            for index, block in enumerate(self.blocks):
                x, side, _ = block(x, sides[index - 2] if index >= 2 else None)
                sides.append(side)
            return x + sides[0]

    def build(self) -> nn.Module:
        return seeded(self.model)

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        return net(features(at.step, at.micro, at.rank).to(net.dtype)).float().pow(2).mean()


class RawModule(ArchitectureJob):
    def __init__(self, architecture: str) -> None:
        super().__init__(ARCHITECTURES[architecture])
        self.name = f"the raw module of {architecture} instead of the engine"

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        return net.module(**self.batch(at)).loss


class BodyAlone(ArchitectureJob):
    name = "a part of the model alone: BERT without its head"

    def __init__(self) -> None:
        super().__init__(ARCHITECTURES["bert"])
        self.name = type(self).name

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        hidden = net.module.bert(tokens(at.step, at.micro, at.rank)).last_hidden_state
        return hidden.float().pow(4).mean()


class HeadOnItsOwn(ArchitectureJob):
    name = "a part of the model alone: GPT-2's body, then its tied head by hand"

    def __init__(self) -> None:
        super().__init__(ARCHITECTURES["gpt2"])
        self.name = type(self).name

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        batch = self.batch(at)
        hidden = net.module.transformer(batch["input_ids"]).last_hidden_state
        logits = net.module.lm_head(hidden[:, :-1]).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


class EncoderAlone(ArchitectureJob):
    name = "a part of the model alone: T5's encoder"

    def __init__(self) -> None:
        super().__init__(ARCHITECTURES["t5"])
        self.name = type(self).name

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        hidden = net.module.get_encoder()(
            input_ids=tokens(at.step, at.micro, at.rank)
        ).last_hidden_state
        return hidden.float().pow(4).mean()


class OneBlockAlone(StackJob):
    name = "one block called from outside the model"

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        x = net.module.enter(features(at.step, at.micro, at.rank).to(net.dtype))
        return net.module.blocks[1](x).float().pow(2).mean()


class PartsInTurn(ArchitectureJob):
    name = "the whole model and a part of it, in turn"

    def __init__(self) -> None:
        super().__init__(ARCHITECTURES["bert"])
        self.name = type(self).name

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        if (at.step + at.micro) % 2:
            return (
                net.module.bert(tokens(at.step, at.micro, at.rank))
                .last_hidden_state.float()
                .pow(4)
                .mean()
            )
        return super().loss(net, at)


@dataclass
class Nested:
    hidden: dict[str, Any]
    note: str


class _NestedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, state: Nested) -> Nested:
        a, (b, extra) = state.hidden["a"], state.hidden["rest"]
        return Nested(
            {"a": a + torch.tanh(self.left(b)), "rest": (b + torch.tanh(self.right(a)), extra)},
            state.note + ".",
        )


class _NestedModel(nn.Module):
    """Blocks that take and return a dataclass holding a dict holding a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(7, 12)
        self.blocks = nn.ModuleList(_NestedBlock() for _ in range(3))

    def forward(self, *, inputs: dict[str, Any]) -> Nested:
        a, b = self.enter(inputs["x"]["features"]).split(6, dim=-1)
        state = Nested({"a": a, "rest": (b, None)}, "")
        for block in self.blocks:
            state = block(state)
        return state


class NestedInputsAndOutputs(Job):
    name = "dicts, tuples and dataclasses in and out"

    def build(self) -> nn.Module:
        return seeded(_NestedModel)

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        state = net(
            inputs={
                "x": {"features": features(at.step, at.micro, at.rank).to(net.dtype)},
                "unused": [1, "two"],
            }
        )
        assert state.note == "..."
        return (state.hidden["a"] * state.hidden["rest"][0]).float().pow(2).mean()


def ways() -> list[Job]:
    plain = (
        CalledTwice, TwoForwards, TwoForwardsOneUsed, DroppedLater, KeptLoss, KeptOutput,
        Interleaved, Generated, BodyAlone, HeadOnItsOwn,
        EncoderAlone, OneBlockAlone, PartsInTurn, NestedInputsAndOutputs,
        GradientsOfInputs, InPlace, ManyOutputs,
    )  # fmt: skip
    return [
        *(kind() for kind in plain),
        Evaluated("no_grad evaluation between micro-batches and before a backward", torch.no_grad),
        Evaluated(
            "inference_mode between micro-batches and before a backward", torch.inference_mode
        ),
        Evaluated(
            "inference_mode of T5 between micro-batches and before a backward",
            torch.inference_mode,
            "t5",
        ),
        RawModule("bert"),
        RawModule("llama"),
    ]
