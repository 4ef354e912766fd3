"""Readers of weights as constants, beside updates of these weights in the backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.engines import config_of, start
from tests.helpers.models import seeded
from tests.helpers.offloads import ended, same
from tests.helpers.ranks import RankFailed
from tests.helpers.stacks import on_ranks
from tests.helpers.training import Plan, adamw

UNITS = {"stage3_param_persistence_threshold": 0, "stage3_module_granularity_threshold": 0}
LAYERS = 6  # the last ones are updated while the first ones are in the backward


class Teacher(nn.Module):
    """The first layer also reads the last one, as a constant, in a checkpoint or not."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(LAYERS))
        self.recomputes = recomputes

    def first(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.layers[0](x))
        if self.recomputes:
            with torch.no_grad():
                target: torch.Tensor = self.layers[-1](hidden)
            return hidden * target
        return torch.tanh(hidden @ self.layers[-1].weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = partial(checkpoint, self.first, use_reentrant=False)
        hidden = first(x) if self.recomputes else self.first(x)
        for layer in self.layers[1:]:
            hidden = torch.tanh(layer(hidden))
        loss: torch.Tensor = hidden.square().mean()
        return loss


def trained(
    recomputes: bool, stage: int, precision: str, early: bool = True, **keys: bool
) -> list[Any]:
    def run(rank: int, model: nn.Module) -> Any:
        zero = {"stage": stage, **UNITS, "update_in_backward": early, **keys}
        plan = Plan(precision=precision, accumulation=1)
        engine = start(model, adamw(model), config_of(stage, plan, zero_optimization=zero))
        for step in range(3):
            generator = torch.Generator().manual_seed(7 * step + rank)
            x = torch.randn(4, 16, generator=generator)
            engine.backward(engine(x.to(next(model.parameters()).dtype)))
            engine.step()
        return ended(engine)

    return on_ranks(2, run, build=lambda: seeded(lambda: Teacher(recomputes)))


@pytest.mark.parametrize("stage, precision", [(1, "fp32"), (3, "fp32"), (3, "bf16")])
def test_a_recomputation_does_not_read_what_its_backward_has_updated(stage, precision):
    with pytest.raises(RankFailed, match=r"PartitionError: layers\.5 runs again inside a backward"):
        trained(True, stage, precision, keep_parameter_shards=False)


@pytest.mark.parametrize("recomputes", [False, True])
def test_values_that_change_in_the_step_may_be_read(recomputes):
    """At stages 0 to 2 master weights are updated; what computes is cast from them in the step."""
    for one, other in zip(*(trained(recomputes, 2, "bf16", early) for early in (True, False))):
        same(one, other, exact=True)
