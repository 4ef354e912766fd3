"""Refusals of an engine, in one process: each error names the offender, and the engine keeps
working.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.distributed import process_group
from hf_zero.errors import ConfigError, PartitionError, ReleasedParameterError
from hf_zero.zero.layout.parameter import ReleasedParameter
from tests.helpers.broken_stacks import Latecomer
from tests.helpers.cells import in_one_item
from tests.helpers.engines import STAGES, config_of, start
from tests.helpers.models import seeded
from tests.helpers.stacks import squared, stack
from tests.helpers.training import At, adamw, plain_sgd

NAME = r"blocks\.1\.up\.weight"


@pytest.fixture(autouse=True)
def one_process():
    yield
    process_group.destroy_process_group()


def backward(engine, step=0):
    engine.backward(squared(engine, At(step, 0, 0)))


def begun(stage, optimizer_of=adamw, **more):
    model = stack()
    return start(model, optimizer_of(model), config_of(stage, **more)), model


# ---- backward and step ----


@in_one_item(STAGES)
def test_a_step_without_a_backward(stage):
    engine, _ = begun(stage)

    def dropped():
        backward(engine)
        engine.zero_grad()

    cases: list[tuple[Callable[[], None], str]] = [
        (lambda: None, "no backward since the last step"),
        (dropped, r"zero_grad\(\) not between it and step"),
        (torch.ones((), requires_grad=True).backward, "does not depend on a parameter that trains"),
    ]
    for number, (before, words) in enumerate(cases):
        before()
        with pytest.raises(PartitionError, match=words):
            engine.step()
        assert not engine.was_step_applied() and engine.micro_steps == number
        backward(engine, number)
        engine.step()
        assert engine.was_step_applied() and engine.global_steps == number + 1
    engine.destroy()
    with pytest.raises(PartitionError, match="was destroyed"):
        engine.step()


def in_no_sync(engine):
    with engine.no_sync():
        backward(engine)
        engine.step()


def with_closure(engine):
    backward(engine)
    engine.optimizer.step(lambda: 0.0)


CALLS: dict[str, tuple[type[Exception], Callable[[Any], Any], str]] = {
    "a vector": (
        PartitionError,
        lambda engine: engine.backward(engine(torch.zeros(3, 7))),
        r"shape \(3, 5\)",
    ),
    "a number": (PartitionError, lambda engine: engine.backward(0.5), "float"),
    "no_sync": (PartitionError, in_no_sync, "no_sync"),
    "a closure": (PartitionError, with_closure, "closure"),
    "arguments": (
        PartitionError,
        lambda engine: engine.load_checkpoint("nowhere", elastic=True, custom_load_fn=None),
        r"\['custom_load_fn', 'elastic'\]",
    ),
    "assignment": (
        PartitionError,
        lambda engine: engine.module.load_state_dict(
            {name: torch.zeros_like(value) for name, value in stack().state_dict().items()},
            assign=True,
        ),
        r"assign=True\) cannot replace [\w.]+",
    ),
    # a released parameter says so itself; elsewhere the first module that the engine has changed
    "pickling": (
        (PartitionError, ReleasedParameterError),
        lambda engine: torch.save(engine.module, io.BytesIO()),
        "cannot be pickled whole|pickling on",
    ),
}


@in_one_item([*itertools.product(CALLS, (1, 3))])
def test_calls_that_are_refused(case):
    """After each of them the engine trains."""
    (error, call, words), stage = CALLS[case[0]], case[1]
    engine, model = begun(stage)
    before = {type(p) for p in model.parameters()}
    with pytest.raises(error, match=words):
        call(engine)
    if case[0] == "assignment":
        assert {type(p) for p in model.parameters()} == before
        if stage == 3:
            engine.schedule.check_all_released()
    backward(engine)
    engine.step()
    assert engine.was_step_applied()


def test_a_step_without_an_optimizer():
    engine, _ = begun(3, lambda model: None)
    with pytest.raises(ConfigError, match="needs an optimizer"):
        engine.step()


@in_one_item((1, 2))
def test_a_gradient_that_comes_after_its_reduction(stage):
    model = seeded(Latecomer)
    engine = start(model, plain_sgd(model), config_of(stage))
    for number in range(2):
        backward(engine, number)
        engine.step()
    model.late = True
    with pytest.raises(PartitionError, match=r"\['blocks\.2'\] came after their reduction"):
        backward(engine, 2)


@in_one_item((1, 2))
def test_a_gradient_that_comes_late_from_the_first_backward_on(stage):
    """The first backward shows it: the block is reduced last from then on, with all of its
    gradient.
    """
    model, want = seeded(Latecomer), seeded(Latecomer)
    model.late = want.late = True
    squared(want, At(0, 0, 0)).backward()
    engine = start(model, plain_sgd(model), config_of(stage))
    backward(engine)
    found = hf_zero.safe_get_full_grad(model.blocks[2].down.bias)
    assert torch.allclose(found, want.blocks[2].down.bias.grad, rtol=1e-5, atol=1e-7)


def _added(model):
    model.blocks[1].up.extra = nn.Parameter(torch.zeros(3))


def _added_module(model):
    model.blocks[1].up.extra = nn.Linear(2, 3)


def _unfrozen(model):
    model.extra.requires_grad_(True)


def _replaced(model):
    model.blocks[1].up.weight = nn.Parameter(torch.zeros(64, 32))


def _replaced_behind(model):
    model.blocks[1]._modules["up"]._parameters["weight"] = nn.Parameter(torch.zeros(64, 32))


def _replaced_module(model):
    model.blocks[1].up = nn.Linear(32, 64)


CHANGES: dict[Callable[[nn.Module], None], str] = {
    _added: r"extra, of shape \(3,\), was added",
    _added_module: r"Linear\.weight, of shape \(3, 2\), was added",
    _unfrozen: r"extra, of shape \(3,\), was added",
    _replaced: rf"{NAME} has been replaced",
    _replaced_behind: rf"{NAME} has been replaced",
    _replaced_module: r"Linear\.weight, of shape \(64, 32\), was added",
}


@in_one_item([*((change, 3, 2) for change in CHANGES), (_added, 1, 0), (_replaced, 0, 2)])
def test_a_change_of_the_model_that_nothing_would_train(case):
    """Before the first step, which looks at everything, and after some: a step that finds all
    modules as the step before has left them looks no closer.
    """
    change, stage, steps = case
    engine, model = begun(stage)
    model.register_parameter("extra", nn.Parameter(torch.zeros(3), requires_grad=False))
    for step in range(steps):
        backward(engine, step)
        engine.step()
    before = set(model.parameters())
    backward(engine, steps)
    change(model)
    for _ in range(2):  # nor does it forget
        with pytest.raises(PartitionError, match=CHANGES[change]):
            engine.step()
        model.zero_grad()
    if change in (_added, _added_module, _unfrozen):
        for p in {*set(model.parameters()) - before, model.extra}:
            p.requires_grad_(False)
        backward(engine, steps)
        engine.step()
        assert engine.was_step_applied()


# ---- parameters and their values ----


def test_a_released_parameter_cannot_be_copied_saved_or_written():
    _, model = begun(3)
    weight = model.blocks[1].up.weight
    assert type(weight) is ReleasedParameter
    attempts: list[tuple[str, Callable[[], Any]]] = [
        ("deepcopy", lambda: copy.deepcopy(weight)),
        ("pickling", lambda: pickle.dumps(weight)),
        ("pickling", lambda: torch.save({"w": weight}, io.BytesIO())),
        ("data", lambda: setattr(weight, "data", torch.zeros(64, 32))),
        ("zero_", lambda: weight.data.zero_()),
        ("add", lambda: weight.detach() + 1),
        ("cat", lambda: torch.cat([weight, weight])),
        ("mul", lambda: torch.mul(input=weight, other=2)),
    ]
    for operation, attempt in attempts:
        with pytest.raises(ReleasedParameterError, match=rf"{operation} on {NAME}"):
            attempt()


@in_one_item((0, 3))
def test_a_gradient_the_engine_has_taken(stage):
    engine, model = begun(stage)
    weight = model.blocks[1].up.weight
    assert weight.grad is None
    backward(engine)
    with pytest.raises(PartitionError, match=rf"gradient of {NAME} has been taken in"):
        _ = weight.grad
    engine.step()
    assert weight.grad is None


# ---- whole values ----


@in_one_item((-1, 1, 7))
def test_a_modifier_that_does_not_exist(rank):
    _, model = begun(3)
    with pytest.raises(PartitionError, match=f"modifier_rank {rank} does not exist among 1 ranks"):
        hf_zero.GatheredParameters(model.head.weight, modifier_rank=rank)


def states(name, value):
    return {
        "safe_set_full_fp32_param": lambda p: hf_zero.safe_set_full_fp32_param(p, value),
        "safe_set_full_grad": lambda p: hf_zero.safe_set_full_grad(p, value),
        "safe_set_full_optimizer_state": lambda p: hf_zero.safe_set_full_optimizer_state(
            p, value, name
        ),
        "safe_get_full_optimizer_state": lambda p: hf_zero.safe_get_full_optimizer_state(p, name),
    }


@in_one_item(STAGES)
def test_values_that_there_are_not(stage):
    """Of no engine, of a frozen parameter, of another shape, of state that is not kept."""
    model, value = stack(), torch.zeros(2, 3)
    model.blocks[0].requires_grad_(False)
    engine = start(model, adamw(model), config_of(stage))
    for _ in range(2):
        backward(engine)
        engine.step()
    backward(engine)
    for function, call in states("exp_avg", value).items():
        if function != "safe_set_full_fp32_param":
            with pytest.raises(PartitionError, match=rf"{function}: .*\(2, 3\) belongs to no"):
                call(nn.Parameter(torch.zeros(2, 3)))
        if "_set_" in function:
            with pytest.raises(PartitionError, match=rf"{function}: .*blocks\.0.* is frozen"):
                call(model.blocks[0].up.weight)
    weight = model.blocks[1].up.weight
    before = hf_zero.safe_get_full_fp32_param(weight)
    for function, call in states("exp_avg", value).items():
        if "_set_" in function:
            with pytest.raises(PartitionError, match=rf"\(2, 3\) for parameter {NAME} of shape"):
                call(weight)
    assert torch.equal(hf_zero.safe_get_full_fp32_param(weight), before)
    for function, call in states("momentum", torch.zeros(64, 32)).items():
        if "state" in function:
            with pytest.raises(PartitionError, match=f"no state 'momentum' for {NAME}"):
                call(weight)


def test_a_unit_that_is_held_whole():
    engine, model = begun(3)
    engine.schedule.check_all_released()
    with (
        hf_zero.GatheredParameters([model.blocks[1].up.weight]),
        pytest.raises(PartitionError, match=r"units \['blocks\.1'\] are still gathered"),
    ):
        engine.schedule.check_all_released()
    engine.schedule.check_all_released()
