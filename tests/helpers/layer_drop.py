"""Progressive layer dropping by hand, for the oracle: the formulas of the paper around each block
of a plain model, with the numbers that the engine draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from hf_zero.techniques.layer_drop import draw
from tests.helpers import models
from tests.helpers.models import Batch, seeded
from tests.helpers.training import At, Driver, Job, plain_sgd

THETA, GAMMA, SEED, DEPTH = 0.4, 0.7, 11, 5


def deep(make: Callable[[], nn.Module], *counts: str) -> Callable[[], nn.Module]:
    """``make()`` with DEPTH layers, whose numbers its configuration has under ``counts``."""

    def built() -> nn.Module:
        model: Any = make()
        for name in counts:
            setattr(model.config, name, DEPTH)
        made: nn.Module = type(model)(model.config)
        return made

    return built


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32, num_attention_heads=4, intermediate_size=64, image_size=8, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=5,
        initializer_range=0.2,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def _images(step: int, micro: int, rank: int) -> Batch:
    return {
        "pixel_values": models.floats(step, micro, rank, 2, 3, 8, 8),
        "labels": models.tokens(step, micro, rank)[:, 0] % 5,
    }


_OF = models.ARCHITECTURES


def _features(step: int, micro: int, rank: int) -> Batch:
    return {"x": models.features(step, micro, rank)}


# By name: how the model is made, what it is called with, the paths of its stacks.
FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Batch], tuple[str, ...]]] = {
    "stack": (lambda: models.Stack(DEPTH, 8), _features, ("blocks",)),
    "bert": (deep(models.bert, "num_hidden_layers"), _OF["bert"].batch, ("bert.encoder.layer",)),
    "gpt2": (deep(models.gpt2, "n_layer"), _OF["gpt2"].batch, ("transformer.h",)),
    "llama": (deep(models.llama, "num_hidden_layers"), _OF["llama"].batch, ("model.layers",)),
    "vit": (deep(vit, "num_hidden_layers"), _images, ("vit.layers",)),
    "t5": (
        deep(models.t5, "num_layers", "num_decoder_layers"),
        _OF["t5"].batch,
        ("encoder.block", "decoder.block"),
    ),
}


def probabilities(step: int, sizes: list[int], keeps_first: bool = False) -> list[float]:
    """p of each block, stack by stack: the paper's equations (4) and (6)."""
    theta = (1 - THETA) * math.exp(-GAMMA * step) + THETA
    return [
        1.0 if keeps_first and i == 1 else 1 - i / size * (1 - theta)
        for size in sizes
        for i in range(1, size + 1)
    ]


def left_out(step: int, p: list[float], micro: int = 0, rank: int = 0) -> list[bool]:
    """Return for each block whether it is dropped, by the probabilities ``p`` of keeping it."""
    drawn = draw(SEED, step, micro, len(p), rank)
    return [number >= each for number, each in zip(drawn, p)]


@dataclass
class LayerDropJob(Job):
    """A model of transformers; the plain one leaves out what the engine would by its section."""

    family: str
    per_rank: bool = False
    # By (step, micro-batch, rank): which blocks the plain model has left out.
    left_out: dict[tuple[int, int, int], list[bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = f"layer drop {self.family} {self.per_rank}"

    @property
    def section(self) -> dict[str, Any]:
        return {"enabled": True, "theta": THETA, "gamma": GAMMA, "per_rank": self.per_rank}

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of the engine's configuration for it."""
        return {"progressive_layer_drop": self.section, "seed": SEED}

    def build(self) -> nn.Module:
        return seeded(FAMILIES[self.family][0])

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return plain_sgd(model)

    def blocks(self, model: nn.Module) -> list[list[nn.Module]]:
        return [list(model.get_submodule(path).children()) for path in FAMILIES[self.family][2]]

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        if not hasattr(net, "engine"):
            self.by_hand(net.module, at)
        return self.loss_of(net, at)

    def loss_of(self, net: Driver, at: At) -> torch.Tensor:
        """The loss of a micro-batch, of what the model runs now."""
        out = net(**FAMILIES[self.family][1](at.step, at.micro, at.rank))
        loss: torch.Tensor = out.pow(2).mean() if isinstance(out, torch.Tensor) else out.loss
        return loss

    def by_hand(self, model: nn.Module, at: At) -> None:
        """Let the plain ``model`` run what the engine runs at ``at``."""
        stacks = self.blocks(model)
        p = probabilities(at.step, [len(stack) for stack in stacks], self.family == "t5")
        out = left_out(at.step, p, at.micro, at.rank if self.per_rank else 0)
        self.left_out[at.step, at.micro, at.rank] = out
        self.leave_out(model, out, p)

    def leave_out(self, model: nn.Module, out: list[bool], p: list[float]) -> None:
        """Let the plain ``model`` skip the blocks that ``out`` names, and scale the others."""
        blocks = [block for stack in self.blocks(model) for block in stack]
        for block, gone, each in zip(blocks, out, p):
            plain = partial(type(block).forward, block)
            block.forward = switched(block, gone, each, plain)  # type: ignore[method-assign]


def switched(
    block: nn.Module, gone: bool, p: float, plain: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the forward of ``block``, which is ``plain``, left out or scaled."""

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if gone and type(block).__name__ == "T5Block":
            return hidden_states, args[1], args[4]  # with the two position biases as they came
        if gone:
            return hidden_states
        out = plain(hidden_states, *args, **kwargs)
        if isinstance(out, tuple):
            return (hidden_states + (out[0] - hidden_states) / p, *out[1:])
        return hidden_states + (out - hidden_states) / p

    return forward
