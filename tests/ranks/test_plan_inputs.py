"""The plan that was checked is built unless a step has changed one of its inputs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.setup import steps
from hf_zero.setup.plan_inputs import PlanInputs
from hf_zero.zero.layout import planner
from hf_zero.zero.layout.sharding import Sharding, set_sharding
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, start
from tests.helpers.models import Stack
from tests.helpers.stacks import on_ranks
from tests.helpers.training import adamw

Change = Callable[[Any, Any], object]


class Config:
    """The configuration of a model, as one of transformers."""

    plan = "a"

    def to_dict(self) -> dict[str, str]:
        return {}


def another_class(model: Any, optimizer: Any) -> None:
    model.head.__class__ = type("Linear", (nn.Linear,), {})


def other_data(model: Any, optimizer: Any) -> None:
    model.head.bias.data = model.head.bias.data.double()


CHANGES: dict[str, Change] = {
    "a class": another_class,
    "an attribute": lambda model, _: setattr(model.head, "_z3_leaf", True),
    "an equal attribute": lambda model, _: setattr(model, "names", [*model.names]),
    "the configuration": lambda model, _: setattr(model.config, "plan", "b"),
    "a child": lambda model, _: setattr(model, "head", nn.Linear(16, 5)),
    "a parameter": lambda model, _: setattr(model.head, "bias", nn.Parameter(torch.zeros(5))),
    "a dtype": other_data,
    "what trains": lambda model, _: model.head.bias.requires_grad_(False),
    "a buffer": lambda model, _: model.register_buffer("scale", torch.ones(1)),
    "a sharding": lambda model, _: set_sharding(model.head.bias, Sharding(partial=True)),
    "a group": lambda _, optimizer: optimizer.param_groups[0]["params"].reverse(),
    "a setting": lambda _, optimizer: optimizer.param_groups[0].update(amsgrad=True),
    "state": lambda model, optimizer: optimizer.state[model.head.bias].update(step=1),
}


@in_turn("change", [*CHANGES])
def test_every_change_of_an_input_is_seen(change: str) -> None:
    model: Any = Stack(1)
    model.config, model.names = Config(), ["a"]
    optimizer = adamw(model)
    before = PlanInputs(model, optimizer)
    assert before.same(PlanInputs(model, optimizer))
    CHANGES[change](model, optimizer)
    assert not before.same(PlanInputs(model, optimizer))


def plans(monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[str]]:
    """Return the number of plans that one call of ``initialize`` makes, and the units."""
    made, plan = [], planner.plan

    def counted(*args: Any, **more: Any) -> Any:
        made.append(plan(*args, **more))
        return made[-1]

    monkeypatch.setattr(planner, "plan", counted)

    def run(rank: int, model: nn.Module) -> list[str]:
        section = {"stage": 3, "stage3_module_granularity_threshold": 0}
        engine = start(model, adamw(model), config_of(3, zero_optimization=section))
        return [unit.name for unit in engine.units]

    (units,) = on_ranks(1, run, build=lambda: Stack(2))
    return len(made), units


def test_a_model_that_no_step_changes_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plans(monkeypatch) == (1, ["", "blocks.0", "blocks.1"])


def test_a_change_of_a_step_is_in_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def mark(setup: Any) -> None:
        setup.model.head._z3_leaf = True

    monkeypatch.setattr(steps, "ORDER", (mark, *steps.ORDER))
    assert plans(monkeypatch) == (2, ["", "blocks.0", "blocks.1", "head"])


def of_depth(blocks: int) -> Callable[[], nn.Module]:
    return lambda: Stack(blocks)


@pytest.mark.counts_calls
@in_turn("stage, most", [(1, 252), (3, 274)])
def test_the_python_that_a_parameter_costs_in_initialize(stage: int, most: int) -> None:
    """Calls of Python functions and resumed generators, torch's included."""

    def run(rank: int, model: nn.Module) -> int:
        optimizer = adamw(model)
        seen = 0

        def count(frame: Any, event: str, arg: Any) -> None:
            nonlocal seen
            seen += event == "call"

        gc.disable()  # a collection calls finalizers of what other tests left
        sys.setprofile(count)
        try:
            engine = start(model, optimizer, config_of(stage))
        finally:
            sys.setprofile(None)
            gc.enable()
        engine.destroy()
        return seen

    on_ranks(1, run, build=of_depth(2))  # imports and caches
    few, many = (on_ranks(1, run, build=of_depth(blocks))[0] for blocks in (20, 60))
    parameters = sum(1 for _ in Stack(60).parameters()) - sum(1 for _ in Stack(20).parameters())
    each = (many - few) / parameters
    assert 50 < each <= most, f"{each:.1f} calls a parameter"
