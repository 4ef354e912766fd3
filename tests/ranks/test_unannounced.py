"""A plain ``.backward()`` that goes through weights alone, where no hook of a module can tell
the engine of it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import PartitionError
from tests.helpers.engines import STAGES, config_of, full_grads, full_weights, start
from tests.helpers.oracle import compare_tensors
from tests.helpers.stacks import on_each_rank, on_ranks, squared, stack
from tests.helpers.training import At, Plan, adamw

RANKS, STEPS, WINDOW = 2, 2, 2
PLACES = (
    "before the forward",
    "between forward and backward",
    "after the backward",
    "in a window of no_sync",
)


def penalty(model: nn.Module) -> torch.Tensor:
    return 0.1 * model.head.weight.float().square().sum()


def by_hand() -> dict[str, torch.Tensor]:
    model = stack()
    optimizer = adamw(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(WINDOW):
            for rank in range(RANKS):
                (
                    (squared(model, At(step, micro, rank)) + penalty(model)) / (RANKS * WINDOW)
                ).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def _penalise(engine: Any, model: nn.Module) -> None:
    with hf_zero.GatheredParameters(model.head.weight):
        term = penalty(model)
    term.backward()


@pytest.mark.turns
@pytest.mark.parametrize("plain", [True, False], ids=["loss.backward", "engine.backward"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("stage", "precision"), [*((stage, "fp32") for stage in STAGES), (0, "fp16"), (2, "fp16")]
)
def test_it_counts_wherever_it_stands(stage, precision, place, plain):
    plan = Plan(ranks=RANKS, accumulation=WINDOW, precision=precision, scale=64.0)

    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage, plan))
        for step in range(STEPS):
            for micro in range(WINDOW):
                if place == PLACES[0]:
                    _penalise(engine, model)
                loss = squared(engine, At(step, micro, rank), plan.dtype)
                if place == PLACES[1]:
                    _penalise(engine, model)
                loss.backward() if plain else engine.backward(loss)
                if place == PLACES[2]:
                    _penalise(engine, model)
                if place == PLACES[3]:
                    with engine.no_sync():
                        _penalise(engine, model)
                engine.step()
        weights = full_weights(engine)
        engine.destroy()
        return weights

    for got in on_ranks(RANKS, run):
        compare_tensors(
            f"weights, {place}", got, by_hand(), 1e-5 if precision == "fp32" else 5e-3, 5e-6
        )


@pytest.mark.parametrize("stage", STAGES)
def test_what_asks_for_gradients_finds_it(stage):
    model = stack()
    penalty(model).backward()
    want = model.head.weight.grad

    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage))
        _penalise(engine, model)
        assert engine.gradient_norm() == pytest.approx(float(want.norm()), rel=1e-6)
        _penalise(engine, model)
        compare_tensors(
            "gradient",
            {"head.weight": full_grads(engine)["head.weight"]},
            {"head.weight": 2 * want},
        )
        _penalise(engine, model)
        with pytest.raises(PartitionError, match=r"the gradient of head\.weight has been taken in"):
            _ = model.head.weight.grad  # the last backward's would be a third of it
        engine.zero_grad()
        assert model.head.weight.grad is None
        with pytest.raises(PartitionError, match="there was no backward since"):
            engine.step()

    on_ranks(RANKS, run)


@on_each_rank(RANKS)
def test_a_gradient_runs_no_python_of_its_own_unless_a_loss_may_be_scaled(rank, model):
    """A model of many small parameters would spend its host time there."""
    other = stack()
    engine = start(model, adamw(model), config_of(2))
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    scaling = start(other, adamw(other), config_of(2, Plan(precision="fp16")))
    assert all(p._post_accumulate_grad_hooks for each in (model, other) for p in each.parameters())
    engine.destroy()
    scaling.destroy()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
