"""Groups of which a rank owns nothing, beside groups that are offloaded: their stand-in counts,
and touches nothing on the device.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hf_zero.optim.own_step import OwnStep
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.ranks import run_ranks
from tests.helpers.training import Plan

OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-2),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
}


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


def train(rank, models, make, section):
    model = models[rank]
    biases = [model.layers[-1].bias]  # at the end of the last flat, which rank 1 owns
    groups = [{"params": [p for p in model.parameters() if p is not biases[0]]}, {"params": biases}]
    engine = start(
        model, make(groups), config_of(2, Plan(ranks=2, clip=0.1), zero_optimization=section)
    )
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        engine.backward(engine(torch.randn(4, 16, generator=generator)))
        engine.step()
    weights, counted = full_weights(engine), engine.bound.scalars()
    state = [value for entry in engine.optimizer.state.values() for value in entry.values()]
    finite = all(
        math.isfinite(float(value.float().sum()))
        for value in state
        if isinstance(value, torch.Tensor)
    )
    stand_ins = len(engine.bound._table.stand_ins)
    engine.destroy()
    return weights, counted, finite, stand_ins


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stand_in_is_stepped_apart_and_counts_as_the_others_do(name, monkeypatch):
    calls = []
    over = OwnStep._over

    def recorded(self, segments, gradients, grad_scale, *more):
        calls.append(
            (
                all(segment.parts for segment in segments),
                any(segment.parts for segment in segments),
                grad_scale,
            )
        )
        over(self, segments, gradients, grad_scale, *more)

    def run(section):
        torch.manual_seed(0)
        first = Blocks()
        models = [Blocks() for _ in range(2)]
        for model in models:
            model.load_state_dict(first.state_dict())
        return run_ranks(2, train, models, OPTIMIZERS[name], section)

    plain = run({"stage": 2})
    monkeypatch.setattr(OwnStep, "_over", recorded)
    offloaded = run({"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}})
    assert [stand_ins for *_, stand_ins in offloaded] == [1, 0]
    assert any(not owned for owned, *_ in calls), "no stand-in was stepped: the case is another one"
    for owned, some, scale in calls:
        assert owned or not (some or scale is not None), (
            "a stand-in was stepped with what is on the device, or scaled by it"
        )
    for (weights, counted, finite, _), (expected, expected_counts, _, _) in zip(offloaded, plain):
        assert finite and counted == expected_counts
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-6)
