"""Ways of calling a model that a counter of forwards gets wrong: recomputed, twice, in part, in
vain, in between, by another door.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.models import ARCHITECTURES, Stack, features, tokens
from tests.helpers.training import At, Driver, Job, StackJob, Way, own_loss, squared_output


def later(at: At, micros: int) -> At:
    """A micro-batch that no window has."""
    return replace(at, micro=at.micro + micros)


def checkpointing(name: str, use_reentrant: bool) -> Way:
    """transformers' own switch."""

    def make() -> nn.Module:
        model: Any = ARCHITECTURES[name].make()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False
        return model

    return Way(f"gradient_checkpointing_enable({use_reentrant=}) on {name}", make, own_loss(name))


class Body(Stack):
    """A stack whose blocks :attr:`call` calls."""

    call: Callable[[Any, torch.Tensor], torch.Tensor]

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


def stack_of(call: Callable[[Any, torch.Tensor], torch.Tensor]) -> type[nn.Module]:
    return type("Called", (Body,), {"call": call})


def each_checkpointed(use_reentrant: bool, again: bool = False) -> Any:
    def call(self: Any, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *([self.blocks[0]] if again else [])):
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        return x

    return stack_of(call)


def two_checkpointed(use_reentrant: bool) -> Any:
    def call(self: Any, x: torch.Tensor) -> torch.Tensor:
        first, one, other = self.blocks
        x = checkpoint(lambda y: other(one(y)), first(x), use_reentrant=use_reentrant)
        return first(x)

    return stack_of(call)


def nested_checkpoints(self: Any, x: torch.Tensor) -> torch.Tensor:
    def inner(y: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.blocks[1], self.blocks[0](y), use_reentrant=False)

    return self.blocks[2](checkpoint(inner, x, use_reentrant=False))


def block_three_times(self: Any, x: torch.Tensor) -> torch.Tensor:
    for index in (0, 1, 0, 2, 0):
        x = self.blocks[index](x)
    return x


def two_forwards(net: Driver, at: At) -> torch.Tensor:
    return squared_output(net, at) + 0.5 * squared_output(net, later(at, 40))


def one_dropped(net: Driver, at: At) -> torch.Tensor:
    own_loss("gpt2", 40)(net, at)
    return own_loss("gpt2")(net, at)


def dropped_later(net: Driver, at: At) -> torch.Tensor:
    loss = squared_output(net, at)
    net.memory["unused"] = squared_output(net, later(at, 40))
    return loss


def kept_loss(net: Driver, at: At) -> torch.Tensor:
    net.memory.setdefault("losses", []).append(squared_output(net, at))
    return net.memory["losses"][-1]


def kept_output(net: Driver, at: At) -> torch.Tensor:
    batch = ARCHITECTURES["bert"].batch(at.step, at.micro, at.rank)
    output = net(**batch, output_hidden_states=True)
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


def evaluated(name: str, guard: Callable[[], Any], architecture: str = "bert") -> Way:
    """Evaluation of other data before each micro-batch, and once more between its forward and
    its backward.
    """
    loss_of, other = own_loss(architecture), own_loss(architecture, 60)

    def look(net: Driver, at: At) -> None:
        net.module.eval()
        with guard():
            value = other(net, at)
        assert torch.isfinite(value), f"evaluation at {at} gave {value}"
        net.module.train()

    def micro(net: Driver, at: At) -> torch.Tensor:
        look(net, at)
        loss = loss_of(net, at)
        look(net, at)
        net.backward(loss)
        return loss

    return Way(name, ARCHITECTURES[architecture].make, loss_of, micro_of=micro)


def generated(net: Driver, at: At) -> torch.Tensor:
    module: Any = net.module.eval()
    prompt = tokens(at.step, at.micro, 0)[:, :4]
    made = module.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, min_new_tokens=3,
        do_sample=False,
    )  # fmt: skip
    assert made.shape == (2, 7)
    module.train()
    return own_loss("gpt2")(net, at)


def gradient_of_input(net: Driver, at: At) -> torch.Tensor:
    """Adversarial training and gradient penalties look at the gradient of the input before the
    backward proper.
    """
    x = features(at.step, at.micro, at.rank).to(net.dtype).requires_grad_()
    loss = net(x).float().pow(2).mean()
    (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert slope.shape == x.shape and bool(slope.any())
    net.backward(loss)
    return loss


def bert_body(net: Driver, at: At) -> torch.Tensor:
    hidden = net.module.bert(tokens(at.step, at.micro, at.rank)).last_hidden_state
    return hidden.float().pow(4).mean()


def body_then_head(net: Driver, at: At) -> torch.Tensor:
    batch = ARCHITECTURES["gpt2"].batch(at.step, at.micro, at.rank)
    hidden = net.module.transformer(batch["input_ids"]).last_hidden_state
    logits = net.module.lm_head(hidden[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def t5_encoder(net: Driver, at: At) -> torch.Tensor:
    hidden = net.module.get_encoder()(input_ids=tokens(at.step, at.micro, at.rank))
    return hidden.last_hidden_state.float().pow(4).mean()


def one_block(net: Driver, at: At) -> torch.Tensor:
    x = net.module.enter(features(at.step, at.micro, at.rank).to(net.dtype))
    return net.module.blocks[1](x).float().pow(2).mean()


class Listed(nn.Module):
    """A layer whose weights are in containers that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ParameterList([torch.randn(7, 6), torch.randn(6, 5)])
        self.rest = nn.ModuleDict({"shifts": nn.ParameterDict({"last": torch.randn(5)})})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.factors[0] @ self.factors[1] + self.rest["shifts"]["last"]


class AroundListed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.head = Listed(), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.part(x))


def listed_alone(net: Driver, at: At) -> torch.Tensor:
    return net.module.part(features(at.step, at.micro, at.rank).to(net.dtype)).float().pow(2).mean()


def parts_in_turn(net: Driver, at: At) -> torch.Tensor:
    return (bert_body if (at.step + at.micro) % 2 else own_loss("bert"))(net, at)


def raw_module(name: str) -> Way:
    batch = ARCHITECTURES[name].batch
    return Way(
        f"the raw module of {name} instead of the engine",
        ARCHITECTURES[name].make,
        lambda net, at: net.module(**batch(at.step, at.micro, at.rank)).loss,
    )


BERT, GPT2, T5 = (ARCHITECTURES[name].make for name in ("bert", "gpt2", "t5"))
CALLED: list[Job] = [
    *(checkpointing(name, reentrant) for name in ("bert", "t5") for reentrant in (False, True)),
    Way("non-reentrant checkpoint around each block", each_checkpointed(False)),
    Way("reentrant checkpoint around each block", each_checkpointed(True)),
    Way(
        "non-reentrant checkpoint around two blocks, another block before and after",
        two_checkpointed(False),
    ),
    Way(
        "reentrant checkpoint around two blocks, another block before and after",
        two_checkpointed(True),
    ),
    Way("a block called twice, each time under a checkpoint", each_checkpointed(False, True)),
    Way("a checkpoint inside a checkpoint", stack_of(nested_checkpoints)),
    Way("a block called three times, with others in between", stack_of(block_three_times)),
    Way("two forwards before one backward", loss_of=two_forwards),
    Way("a forward whose output is dropped at once", GPT2, one_dropped),
    Way("a forward that is dropped during the next window", loss_of=dropped_later),
    Way("losses kept with their graphs", loss_of=kept_loss),
    Way("outputs with hidden states kept over steps", BERT, kept_output),
    Interleaved(),
    Way("generate between micro-batches", GPT2, generated),
    Way("a part of the model alone: BERT without its head", BERT, bert_body),
    Way(
        "a part of the model alone: GPT-2's body, then its tied head by hand", GPT2, body_then_head
    ),
    Way("a part of the model alone: T5's encoder", T5, t5_encoder),
    Way("one block called from outside the model", loss_of=one_block),
    Way("a part of the model alone: one with a ParameterList", AroundListed, listed_alone),
    Way("the whole model and a part of it, in turn", BERT, parts_in_turn),
    Way(
        "autograd.grad of the input, then the backward of the same graph",
        micro_of=gradient_of_input,
    ),
    evaluated("no_grad evaluation between micro-batches and before a backward", torch.no_grad),
    evaluated("inference_mode between micro-batches and before a backward", torch.inference_mode),
    evaluated(
        "inference_mode of T5 between micro-batches and before a backward",
        torch.inference_mode,
        "t5",
    ),
    raw_module("bert"),
    raw_module("llama"),
]
