"""Optimizers: by name from the config, the user's own object with live groups, state it already
has, those refused.
"""

from __future__ import annotations

import pytest
import torch

from hf_zero.errors import UnsupportedOptimizerError
from tests.helpers import oracle
from tests.helpers.engines import STAGES, config_of, full_weights, start
from tests.helpers.stacks import by_hand, on_ranks, squared
from tests.helpers.training import At, adamw, trainable

RANKS = 2
WINDOWS = [[(1.0, 0)]] * 4


def train(engine, rank, steps=range(4), after_step=lambda step: None):
    for step in steps:
        engine.backward(squared(engine, At(step, 0, rank)))
        engine.step()
        after_step(step)


def lion(parameters, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
    """Lion (arXiv 2302.06675) as one would write it down."""

    class Written(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    moment = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    update = torch.sign(betas[0] * moment + (1 - betas[0]) * p.grad)
                    p.mul_(1 - lr * weight_decay).add_(update, alpha=-lr)
                    moment.mul_(betas[1]).add_(p.grad, alpha=1 - betas[1])

    return Written(parameters, {})


BY_NAME = {
    "AdamW": (
        {"lr": 1e-3, "betas": [0.8, 0.99], "eps": 1e-6, "weight_decay": 0.1},
        torch.optim.AdamW,
    ),
    "Adam": ({"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.0}, torch.optim.Adam),
    "SGD": ({"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, torch.optim.SGD),
    "Adagrad": ({"lr": 0.01, "eps": 1e-6}, torch.optim.Adagrad),
    "RMSprop": ({"lr": 1e-3, "eps": 1e-4}, torch.optim.RMSprop),
    "NAdam": ({"lr": 1e-3, "eps": 1e-6}, torch.optim.NAdam),
    "Lion": ({"lr": 1e-4, "weight_decay": 0.1}, lion),
}


@pytest.mark.turns
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", BY_NAME)
def test_by_name_from_the_config(name, stage):
    params, kind = BY_NAME[name]
    want, _ = by_hand(lambda model: kind(trainable(model), **params), WINDOWS, RANKS)

    def run(rank, model):
        engine = start(model, None, config_of(stage, optimizer={"type": name, "params": params}))
        train(engine, rank)
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want, floor=oracle.ADAM_ROUNDING)


@pytest.mark.parametrize("stage", STAGES)
def test_model_parameters_as_groups(stage):
    """Groups handed to initialize beside an optimizer from the config."""

    def groups(model):
        return [
            {"params": list(model.head.parameters()), "lr": 0.1},
            {"params": [p for b in (model.enter, model.blocks) for p in b.parameters()]},
        ]

    want, _ = by_hand(lambda model: torch.optim.SGD(groups(model), lr=0.01), WINDOWS, RANKS)

    def run(rank, model):
        config = config_of(stage, optimizer={"type": "SGD", "params": {"lr": 0.01}})
        engine = start(model, None, config, model_parameters=groups(model))
        assert [group["lr"] for group in engine.optimizer.param_groups] == [0.1, 0.01]
        train(engine, rank)
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want)


@pytest.mark.parametrize("stage", STAGES)
def test_the_users_object_stays_and_its_groups_are_live(stage):
    def halve(step, model, optimizer):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    want, _ = by_hand(adamw, WINDOWS, RANKS, after_step=halve)

    def run(rank, model):
        import hf_zero

        mine = adamw(model)
        groups = list(mine.param_groups)
        engine, optimizer, loader, scheduler = hf_zero.initialize(
            model=model, optimizer=mine, config=config_of(stage)
        )
        assert optimizer is mine and engine.optimizer is mine
        assert all(now is before for now, before in zip(optimizer.param_groups, groups)) and len(
            optimizer.param_groups
        ) == len(groups)
        assert loader is None and scheduler is None
        train(engine, rank, after_step=lambda step: halve(step, None, mine))
        assert engine.get_lr() == [pytest.approx(1e-3 / 16)]
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want, floor=oracle.ADAM_ROUNDING)


@pytest.mark.parametrize("stage", STAGES)
def test_step_and_zero_grad_of_the_optimizer_are_the_engines(stage):
    """A plain loop: loss.backward(), optimizer.step(), optimizer.zero_grad()."""
    want, _ = by_hand(adamw, WINDOWS, RANKS)

    def run(rank, model):
        optimizer = adamw(model)
        engine = start(model, optimizer, config_of(stage))
        for step in range(4):
            squared(engine, At(step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want, floor=oracle.ADAM_ROUNDING)


@pytest.mark.parametrize("stage", STAGES)
def test_state_the_optimizer_already_has_is_carried_over(stage):
    """Four plain steps, or two plain ones and two on the engine, end alike.

    Both ranks saw the same data before.
    """
    windows = [[(1.0, 0)]] * 4

    def plain(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            for rank in range(RANKS):
                (squared(model, At(step, 0, rank)) / RANKS).backward()
            optimizer.step()
        optimizer.zero_grad()

    want, _ = by_hand(adamw, windows, RANKS)

    def run(rank, model):
        optimizer = adamw(model)
        plain(model, optimizer, range(2))
        engine = start(model, optimizer, config_of(stage))
        train(engine, rank, steps=range(2, 4))
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want, floor=oracle.ADAM_ROUNDING)


class Mine(torch.optim.SGD):
    """An element-wise class of the user's own, with a step that is not torch's."""

    def step(self, closure=None):
        return super().step(closure)


def test_a_class_that_is_not_known_is_refused_by_name_and_accepted_when_vouched_for():
    def refused(rank, model):
        with pytest.raises(UnsupportedOptimizerError, match="Mine") as caught:
            start(model, Mine(trainable(model), lr=0.05), config_of(3))
        assert "elementwise_optimizers" in str(caught.value)
        with pytest.raises(UnsupportedOptimizerError, match="LBFGS"):
            start(model, torch.optim.LBFGS(trainable(model)), config_of(3))

    on_ranks(RANKS, refused)
    want, _ = by_hand(lambda model: torch.optim.SGD(trainable(model), lr=0.05), WINDOWS, RANKS)

    def vouched(rank, model):
        engine = start(
            model, Mine(trainable(model), lr=0.05), config_of(3, elementwise_optimizers=["Mine"])
        )
        train(engine, rank)
        return full_weights(engine)

    for weights in on_ranks(RANKS, vouched):
        oracle.compare_tensors("weights", weights, want)


@pytest.mark.parametrize("stage", STAGES)
def test_no_optimizer_at_all_evaluates(stage):
    def run(rank, model):
        engine = start(model, None, config_of(stage))
        assert engine.optimizer is None
        engine.eval()
        with torch.no_grad():
            return float(squared(engine, At(0, 0, 0)))

    from tests.helpers.stacks import stack

    assert on_ranks(RANKS, run) == pytest.approx(
        [float(squared(stack(), At(0, 0, 0)))] * RANKS, rel=1e-6
    )
