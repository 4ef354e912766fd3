"""Refusals of an engine, in one process: each error names the offender and the remedy, and the
engine keeps working.
"""

from __future__ import annotations

import copy
import io
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


@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_that_is_no_scalar(stage):
    engine, _ = begun(stage)
    with pytest.raises(
        PartitionError, match=r"scalar loss, not one of shape \(3, 5\); reduce it with \.mean\(\)"
    ):
        engine.backward(engine(torch.zeros(3, 7)))
    with pytest.raises(PartitionError, match=r"a scalar tensor, not float; pass outputs.loss"):
        engine.backward(0.5)  # type: ignore[arg-type]
    backward(engine)
    engine.step()


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_without_a_backward(stage):
    engine, _ = begun(stage)

    def dropped():
        backward(engine)
        engine.zero_grad()

    cases: list[tuple[Callable[[], None], str]] = [
        (lambda: None, r"no backward since the last step or zero_grad\(\), or its loss does not"),
        (dropped, r"zero_grad\(\) not between it and step"),
        (torch.ones((), requires_grad=True).backward, "does not depend on a parameter that trains"),
    ]
    for number, (before, words) in enumerate(cases):
        before()
        with pytest.raises(PartitionError, match=words):
            engine.step()
        assert not engine.was_step_applied() and engine.micro_steps == number, (
            "a refused step was counted"
        )
        backward(engine, number)
        engine.step()
        assert engine.was_step_applied() and engine.global_steps == number + 1
    engine.destroy()
    with pytest.raises(PartitionError, match="was destroyed"):
        engine.step()


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_without_an_optimizer(stage):
    engine, _ = begun(stage, lambda model: None)
    with pytest.raises(
        ConfigError,
        match=r"needs an optimizer, and the engine was built without one; pass one to "
        r"hf_zero\.initialize or name one in the config",
    ):
        engine.step()


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_inside_no_sync(stage):
    engine, _ = begun(stage)
    with engine.no_sync():
        backward(engine)
        with pytest.raises(PartitionError, match=r"inside no_sync.*leave the no_sync block first"):
            engine.step()
    engine.step()
    assert engine.was_step_applied()


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_step_with_a_closure(stage):
    engine, _ = begun(stage)
    backward(engine)
    with pytest.raises(PartitionError, match=r"step\(closure\) cannot run under ZeRO.*without it"):
        engine.optimizer.step(lambda: 0.0)
    engine.optimizer.step()
    assert engine.was_step_applied()


@pytest.mark.parametrize("stage", STAGES)
def test_arguments_of_load_checkpoint_that_do_not_exist(stage):
    engine, _ = begun(stage)
    with pytest.raises(
        PartitionError,
        match=r"load_checkpoint does not know \['custom_load_fn', 'elastic'\]; drop these",
    ):
        engine.load_checkpoint("nowhere", elastic=True, custom_load_fn=None)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_gradient_that_comes_after_its_reduction(stage):
    model = seeded(Latecomer)
    engine = start(model, plain_sgd(model), config_of(stage))
    for number in range(2):
        backward(engine, number)
        engine.step()
    model.late = True
    with pytest.raises(
        PartitionError,
        match=r"gradients of \['blocks\.2'\] came after their reduction.*after the forward, or "
        r"from the first backward on",
    ):
        backward(engine, 2)


@pytest.mark.parametrize("stage", [1, 2])
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


ADDED = r"of shape \({}\), was added to the model after hf_zero\.initialize"
REPLACED = rf"{NAME} has been replaced by another parameter after hf_zero\.initialize"
CHANGES: dict[Callable[[nn.Module], None], str] = {
    _added: r"extra, " + ADDED.format("3,"),
    _added_module: r"Linear\.weight, " + ADDED.format("3, 2"),
    _unfrozen: "extra, " + ADDED.format("3,"),
    _replaced: REPLACED,
    _replaced_behind: REPLACED,
    _replaced_module: r"Linear\.weight, " + ADDED.format("64, 32"),
}


@pytest.mark.turns
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_change_of_the_model_that_nothing_would_train(stage, change, steps):
    """Before the first step, which looks at everything, and after some: a step that finds all
    modules as the step before has left them looks no closer.
    """
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
    attempts: dict[str, Callable[[], Any]] = {
        "deepcopy": lambda: copy.deepcopy(weight),
        "pickling": lambda: pickle.dumps(weight),
        "pickling ": lambda: torch.save({"w": weight}, io.BytesIO()),
        "data": lambda: setattr(weight, "data", torch.zeros(64, 32)),
        "zero_": lambda: weight.data.zero_(),
        "add": lambda: weight.detach() + 1,
        "cat": lambda: torch.cat([weight, weight]),
        "mul": lambda: torch.mul(input=weight, other=2),
    }
    for operation, attempt in attempts.items():
        with pytest.raises(
            ReleasedParameterError, match=rf"{operation.strip()} on {NAME}.*GatheredParameters"
        ):
            attempt()


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_the_engine_has_taken(stage):
    engine, model = begun(stage)
    weight = model.blocks[1].up.weight
    assert weight.grad is None
    backward(engine)
    with pytest.raises(
        PartitionError,
        match=rf"gradient of {NAME} has been taken in.*get_global_grad_norm.*safe_get_full_grad",
    ):
        _ = weight.grad
    engine.step()
    assert weight.grad is None


@pytest.mark.parametrize("stage", STAGES)
def test_loading_by_assignment(stage):
    engine, model = begun(stage)
    before = {type(p) for p in model.parameters()}
    state = {name: torch.zeros_like(value) for name, value in stack().state_dict().items()}
    with pytest.raises(
        PartitionError,
        match=r"load_state_dict\(assign=True\) cannot replace [\w.]+, which lives in a flat buffer",
    ):
        model.load_state_dict(state, assign=True)
    if stage == 3:
        engine.schedule.check_all_released()
    assert {type(p) for p in model.parameters()} == before
    backward(engine)
    engine.step()


@pytest.mark.parametrize("stage", STAGES)
def test_pickling_the_whole_model(stage):
    """A released parameter says so itself; elsewhere the first module that the engine has
    changed.
    """
    _, model = begun(stage)
    with pytest.raises(
        (PartitionError, ReleasedParameterError),
        match=r"a \w+ under an engine cannot be pickled whole|pickling on",
    ):
        torch.save(model, io.BytesIO())


# ---- whole values ----


@pytest.mark.parametrize("rank", [-1, 1, 7])
def test_a_modifier_that_does_not_exist(rank):
    _, model = begun(3)
    with pytest.raises(
        PartitionError,
        match=f"modifier_rank {rank} does not exist among 1 ranks; pass one of them or None",
    ):
        hf_zero.GatheredParameters(model.head.weight, modifier_rank=rank)


ON_A_PARAMETER: dict[str, Callable[[torch.Tensor], Any]] = {
    "safe_get_full_optimizer_state": lambda p: hf_zero.safe_get_full_optimizer_state(p, "exp_avg"),
    "safe_set_full_optimizer_state": lambda p: hf_zero.safe_set_full_optimizer_state(
        p, torch.zeros(p.shape), "exp_avg"
    ),
    "safe_set_full_grad": lambda p: hf_zero.safe_set_full_grad(p, torch.zeros(p.shape)),
}
OWNED_ALONE = {
    **ON_A_PARAMETER,
    "safe_get_full_grad": hf_zero.safe_get_full_grad,
    "safe_set_full_fp32_param": lambda p: hf_zero.safe_set_full_fp32_param(p, torch.zeros(p.shape)),
}


@pytest.mark.parametrize("function", ON_A_PARAMETER)
def test_a_tensor_of_no_engine(function):
    with pytest.raises(
        PartitionError,
        match=rf"{function}: this tensor of shape \(2, 3\) belongs to no hf-zero "
        rf"engine; pass a parameter",
    ):
        ON_A_PARAMETER[function](nn.Parameter(torch.zeros(2, 3)))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("function", [name for name in OWNED_ALONE if "_get_" not in name])
def test_a_frozen_parameter(function, stage):
    model = stack()
    model.blocks[1].requires_grad_(False)
    start(model, adamw(model), config_of(stage))
    with pytest.raises(
        PartitionError,
        match=rf"{function}: parameter {NAME} is frozen.*unfreeze it before initialize",
    ):
        OWNED_ALONE[function](model.blocks[1].up.weight)


@pytest.mark.parametrize("stage", STAGES)
def test_a_value_of_another_shape(stage):
    engine, model = begun(stage)
    backward(engine)
    engine.step()
    backward(engine)
    weight, value = model.blocks[1].up.weight, torch.zeros(2, 3)
    before = hf_zero.safe_get_full_fp32_param(weight)
    for function in (
        lambda: hf_zero.safe_set_full_fp32_param(weight, value),
        lambda: hf_zero.safe_set_full_grad(weight, value),
        lambda: hf_zero.safe_set_full_optimizer_state(weight, value, "exp_avg"),
    ):
        with pytest.raises(
            PartitionError,
            match=rf"value of shape \(2, 3\) for parameter {NAME} of shape \(64, 32\); "
            rf"pass the whole tensor",
        ):
            function()
    assert torch.equal(hf_zero.safe_get_full_fp32_param(weight), before)


@pytest.mark.parametrize("stage", STAGES)
def test_state_that_the_optimizer_does_not_keep(stage):
    engine, model = begun(stage)
    backward(engine)
    engine.step()
    weight = model.blocks[1].up.weight
    with pytest.raises(
        PartitionError,
        match=rf"keeps no state 'momentum' for {NAME}; it keeps \['exp_avg', 'exp_avg_sq'\]",
    ):
        hf_zero.safe_get_full_optimizer_state(weight, "momentum")
    with pytest.raises(PartitionError, match="keeps no state 'momentum'"):
        hf_zero.safe_set_full_optimizer_state(weight, torch.zeros(64, 32), "momentum")


def test_a_unit_that_is_held_whole():
    engine, model = begun(3)
    engine.schedule.check_all_released()
    match = r"units \['blocks\.1'\] are still gathered; leave the GatheredParameters blocks"
    with (
        hf_zero.GatheredParameters([model.blocks[1].up.weight]),
        pytest.raises(PartitionError, match=match),
    ):
        engine.schedule.check_all_released()
    engine.schedule.check_all_released()
