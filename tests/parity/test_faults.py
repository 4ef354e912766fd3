"""Seeded faults of the engine, found by the comparison of a plain recipe: what it names first, and
in which step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.parity.answers import Answer
from hf_zero.parity.causes import OF_ENGINE
from tests.helpers.ranks import run_ranks
from tests.helpers.seeded_faults import seeded
from tests.parity.loops import FEATURES, config, loop, stack

LOSS, NORM, RATE = "loss", "gradient norm", "learning rate"
WEIGHTS, FORWARD = "weights", "weights of the forward"
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}  # Adam ignores factors of gradients
SMALL_SCALE = {"fp16": {"enabled": True, "initial_scale_power": 6}}


class Skipping(nn.Sequential):
    """A model whose second block is left out in every other forward."""

    calls = 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for number, module in enumerate(self):
            if number != 1 or self.calls % 2:
                batch = module(batch)
        return batch


def skipping(rank: int) -> nn.Module:
    model = stack()
    model[1][0].weight = nn.Parameter(model[1][0].weight.detach().clone())
    return Skipping(*model)


class Mixing(nn.Module):
    """Mixes features by a buffer that lies column by column, with other values on each rank."""

    def __init__(self, rank: int):
        super().__init__()
        values = torch.rand(FEATURES, FEATURES, generator=torch.Generator().manual_seed(rank))
        self.register_buffer("mix", values.t())

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch @ self.mix


def writes_a_row(engine: Any, micro_step: int) -> None:
    if micro_step == 1:
        with torch.no_grad():
            engine.module[3].bias[:1].mul_(2.0)


def drops_a_window(engine: Any, micro_step: int) -> bool:
    """The second window is dropped at its second micro-batch."""
    if micro_step == 4:
        engine.zero_grad()
    return micro_step == 4


@dataclass(frozen=True)
class Recipe:
    """A run on two ranks, and what is named first of it, in which step."""

    stage: int
    what: str
    step: int
    precision: str = "fp32"
    accumulation: int = 1
    more: dict[str, Any] = field(default_factory=dict)
    model: Callable[[int], nn.Module] = lambda rank: stack()
    spoil: Callable[[Any, int], object] = lambda engine, step: None

    def answer(self) -> Answer:
        settings = config(self.stage, self.precision, self.accumulation, **copy.deepcopy(self.more))

        def compare(rank: int) -> Answer:
            return hf_zero.parity(loop(rank, self.model(rank), settings, spoil=self.spoil))

        return run_ranks(2, compare)[0]


SCHEDULE = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.1}}
FAULTS = {
    "mean-over-one-rank-more": Recipe(2, NORM, 1),
    "norm-of-the-own-shards": Recipe(3, NORM, 1),
    "shards-keep-the-weights-of-the-last-step": Recipe(2, FORWARD, 1, "bf16"),
    "used-parameters-stay-used": Recipe(1, WEIGHTS, 2, model=skipping),
}
LONG = {
    "weight-of-a-micro-batch-is-lost-on-the-wire": Recipe(2, NORM, 1, "bf16", 3),
    "second-micro-batch-replaces-the-first": Recipe(1, NORM, 1, accumulation=3),
    "second-reduction-replaces-the-first": Recipe(3, NORM, 1, accumulation=3),
    "norm-lacks-a-flat-buffer": Recipe(1, NORM, 1),
    "clipping-raises-small-gradients": Recipe(2, WEIGHTS, 1, more={**SGD, "gradient_clipping": 9}),
    "clipping-forgets-the-loss-scale": Recipe(2, WEIGHTS, 1, "fp16", more={**SGD, **SMALL_SCALE}),
    "loss-scale-falls-an-overflow-late": Recipe(1, "loss scale", 2, "fp16"),
    "whole-weights-are-not-gathered-after-a-step": Recipe(1, FORWARD, 1),
    "schedule-goes-on-after-a-skipped-step": Recipe(
        2, RATE, 2, "fp16", more={**SGD, "scheduler": SCHEDULE}
    ),
    "learning-rate-is-twice-the-group-s": Recipe(2, WEIGHTS, 1),
    "window-ends-a-micro-batch-early": Recipe(1, "number of losses", 1, accumulation=3),
    "zero-grad-keeps-the-count-of-the-window": Recipe(
        2, "number of losses", 2, accumulation=3, spoil=drops_a_window
    ),
    "writes-of-a-script-are-lost": Recipe(2, WEIGHTS, 2, "bf16", spoil=writes_a_row),
    "schedule-runs-at-twice-its-pace": Recipe(2, RATE, 1, more={**SGD, "scheduler": SCHEDULE}),
    "gaps-keep-each-ranks-own-values": Recipe(
        0, LOSS, 1, model=lambda rank: nn.Sequential(Mixing(rank), *stack())
    ),
    "lr-decay-of-adagrad-counts-one-step-more": Recipe(
        2,
        WEIGHTS,
        1,
        more={
            "optimizer": {"type": "Adagrad", "params": {"lr": 0.1, "lr_decay": 0.5}},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
    ),
}


@pytest.mark.parametrize(
    "name", [*FAULTS, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]
)
def test_a_fault_is_named_in_the_step_where_it_acts(name: str) -> None:
    recipe = {**FAULTS, **LONG}[name]
    with seeded(name):
        result = recipe.answer()
    first = result.outcome.first
    assert first is not None, str(result)
    assert (first.what, first.step) == (recipe.what, recipe.step), str(result)
    assert result.cause == OF_ENGINE
    assert recipe.answer().equal  # without the fault
