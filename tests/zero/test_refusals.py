"""Refusals of an engine, and of models that it cannot lay out: each error names the offender, and
nothing is changed.
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
from hf_zero.errors import (
    ConfigError,
    HfZeroError,
    PartitionError,
    RankMismatchError,
    ReleasedParameterError,
)
from hf_zero.zero.access import local
from hf_zero.zero.layout.initial_values import pending
from hf_zero.zero.layout.parameter import ReleasedParameter
from hf_zero.zero.layout.wrap import find_units
from hf_zero.zero.materialize import check_parameters
from tests.helpers.broken_stacks import Latecomer
from tests.helpers.cells import in_one_item, in_turn
from tests.helpers.engines import STAGES, config_of, start, still_gathered
from tests.helpers.models import seeded
from tests.helpers.stacks import on_each_rank, squared, stack
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


def dropped(engine):
    backward(engine)
    engine.zero_grad()


@in_one_item(STAGES)
def test_a_step_without_a_backward(stage):
    engine, _ = begun(stage)
    cases = {
        "no backward since the last step": lambda engine: squared(engine, At(9, 0, 0)),
        r"zero_grad\(\) not between it and step": dropped,
        "does not depend on a parameter that trains": lambda engine: (
            squared(engine, At(9, 0, 0)),
            torch.ones((), requires_grad=True).backward(),
        ),
    }
    for number, (words, before) in enumerate(cases.items()):
        before(engine)
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


def assigned(engine):
    values = {name: torch.zeros_like(value) for name, value in stack().state_dict().items()}
    engine.module.load_state_dict(values, assign=True)


CALLS: dict[str, Callable[[Any], Any]] = {
    r"shape \(3, 5\)": lambda engine: engine.backward(engine(torch.zeros(3, 7))),
    "float": lambda engine: engine.backward(0.5),
    "no_sync": in_no_sync,
    "closure": with_closure,
    r"\['custom_load_fn', 'elastic'\]": lambda engine: engine.load_checkpoint(
        "nowhere", elastic=True, custom_load_fn=None
    ),
    r"assign=True\) cannot replace [\w.]+": assigned,
    # a released parameter says so itself; elsewhere the first module that the engine has changed
    "cannot be pickled whole|pickling on": lambda engine: torch.save(engine.module, io.BytesIO()),
}


@in_one_item([*itertools.product(CALLS, (1, 3))])
def test_calls_that_are_refused(case):
    """After each of them the engine trains."""
    words, stage = case
    engine, model = begun(stage)
    before = {type(p) for p in model.parameters()}
    with pytest.raises((PartitionError, ReleasedParameterError), match=words):
        CALLS[words](engine)
    if CALLS[words] is assigned:
        assert {type(p) for p in model.parameters()} == before
        if stage == 3:
            assert not still_gathered(engine)
    backward(engine)
    engine.step()
    assert engine.was_step_applied()


def test_a_schedule_that_the_script_steps_too(tmp_path):
    """A script may step it before the first step, and a load may move it."""
    engine, _ = begun(3)
    engine.lr_scheduler = schedule = torch.optim.lr_scheduler.LambdaLR(
        engine.optimizer, lambda step: 1 / (1 + step)
    )
    schedule.step()
    for step in range(2):
        backward(engine, step)
        engine.step()
    engine.save_checkpoint(tmp_path)
    backward(engine, 2)
    engine.step()
    engine.load_checkpoint(tmp_path)
    backward(engine, 2)
    engine.step()
    assert engine.get_lr() == [pytest.approx(engine.optimizer.defaults["lr"] / 5)]
    backward(engine, 3)
    schedule.step()
    weights = engine.state_dict()
    with pytest.raises(PartitionError, match=r"LambdaLR\.step\(\)"):
        engine.step()
    assert all(engine.state_dict()[name].equal(value) for name, value in weights.items())


def test_a_step_without_an_optimizer():
    engine, _ = begun(3, lambda model: None)
    with pytest.raises(ConfigError, match="needs an optimizer"):
        engine.step()


@in_one_item((1, 2))
def test_a_gradient_that_comes_after_its_reduction(stage):
    """One that comes late from the first backward on is reduced last, with all of its gradient."""
    model, want = seeded(Latecomer), seeded(Latecomer)
    engine = start(model, plain_sgd(model), config_of(stage))
    for number in range(2):
        backward(engine, number)
        engine.step()
    model.late = True
    with pytest.raises(PartitionError, match=r"\['blocks\.2'\] came after their reduction"):
        backward(engine, 2)
    engine.destroy()
    model, want.late = seeded(Latecomer), True
    model.late = True
    squared(want, At(0, 0, 0)).backward()
    engine = start(model, plain_sgd(model), config_of(stage))
    backward(engine)
    found = hf_zero.safe_get_full_grad(model.blocks[2].down.bias)
    assert torch.allclose(found, want.blocks[2].down.bias.grad, rtol=1e-5, atol=1e-7)


def _added(model):
    model.blocks[1].up.extra = nn.Parameter(torch.zeros(3))


def _unfrozen(model):
    model.extra.requires_grad_(True)


def _replaced_behind(model):
    model.blocks[1]._modules["up"]._parameters["weight"] = nn.Parameter(torch.zeros(64, 32))


def _replaced_module(model):
    model.blocks[1].up = nn.Linear(32, 64)


CHANGES: dict[Callable[[nn.Module], None], str] = {
    _added: r"extra, of shape \(3,\), was added",
    _unfrozen: r"extra, of shape \(3,\), was added",
    _replaced_behind: rf"{NAME} has been replaced",
    _replaced_module: r"Linear\.weight, of shape \(64, 32\), was added",
}


@in_one_item([*((change, 3, 2) for change in CHANGES), (_added, 1, 0), (_replaced_behind, 0, 2)])
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
    if change in (_added, _unfrozen):
        for p in {*set(model.parameters()) - before, model.extra}:
            p.requires_grad_(False)
        backward(engine, steps)
        engine.step()
        assert engine.was_step_applied()


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


def test_an_engine_cannot_be_copied():
    with pytest.raises(PartitionError, match=r"an engine cannot be copied.*engine\.state_dict\(\)"):
        copy.deepcopy(begun(1)[0])


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


@in_one_item(STAGES)
def test_values_that_are_no_tensors(stage):
    engine, model = begun(stage)
    backward(engine)
    engine.step()
    backward(engine)
    weight = model.blocks[1].up.weight
    for value in (None, 1.0):
        for function, call in states("exp_avg", value).items():
            if "_set_" in function:
                with pytest.raises(PartitionError, match=rf"{function}: {value} for .*{NAME}"):
                    call(weight)
        with pytest.raises(PartitionError, match=f"_local_fp32_param: {value} for the"):
            local.safe_set_local_fp32_param(weight, value)
        with pytest.raises(PartitionError, match=f"safe_set_full_grad: {value} for .*{NAME}"):
            local.safe_update_full_grad_vectorized([weight], lambda *_, value=value: value)
    for call in states("exp_avg", torch.zeros(1)).values():
        with pytest.raises(PartitionError, match=r"None.* is no parameter; pass one of the model"):
            call(None)
    with pytest.raises(PartitionError, match="this NoneType belongs to no hf-zero engine"):
        local.safe_get_local_fp32_param(None)
    for given in ("up", 5, model.named_parameters()):
        with pytest.raises(PartitionError, match=r"was given .*; pass parameters"):
            hf_zero.GatheredParameters(given)
    engine.destroy()


def test_writes_of_one_tensor_and_of_another_shape():
    engine, model = begun(2)
    backward(engine)
    weight, free = model.blocks[1].up.weight, nn.Parameter(torch.zeros(2, 3))
    local.safe_update_full_grad_vectorized(weight, lambda gradient, _: gradient.zero_())
    assert not hf_zero.safe_get_full_grad(weight).any()
    with pytest.raises(PartitionError, match=r"shape \(3,\) for parameter .* of shape \(2, 3\)"):
        hf_zero.safe_set_full_fp32_param(free, torch.ones(3))
    assert not free.any()
    engine.destroy()


def test_a_unit_that_is_held_whole():
    engine, model = begun(3)
    weights = [model.blocks[1].up.weight]
    for rank in (-1, 1, 7, "0", 0.5):
        words = f"modifier_rank {rank} does not exist among 1 ranks"
        with pytest.raises(PartitionError, match=words):
            hf_zero.GatheredParameters(weights, modifier_rank=rank)
    assert not still_gathered(engine)
    with hf_zero.GatheredParameters(weights):
        assert still_gathered(engine) == ["blocks.1"]
    assert not still_gathered(engine)


def plain(model):
    kinds = {type(p) for p in model.parameters()} - {Special}
    return kinds <= {nn.Parameter} and not model._forward_hooks


class Special(torch.Tensor):
    """Stands for tensors without memory of their own: those of torchao, distributed ones."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return Special(args[0])


def with_table(value):
    model = stack()
    model.blocks[1].register_buffer("table", value, persistent=False)
    return model, adamw(model)


def with_weight(value):
    model = stack()
    model.blocks[1].up.weight = nn.Parameter(value)
    return model, None


def with_buffer():
    model = stack()
    model.blocks[1].norm.register_buffer("angles", torch.empty(4, device="meta"))
    return model, None


def with_another_head():
    model = stack()
    optimizer = adamw(model)
    model.head = nn.Linear(32, 5)
    return model, optimizer


def in_16_bits():
    model = stack().bfloat16()
    return model, plain_sgd(model)


MODELS = {
    f"{NAME} is on the meta device": lambda: with_weight(torch.empty(64, 32, device="meta")),
    "buffer angles of LayerNorm is on the meta device": with_buffer,
    f"{NAME} is torch.complex64": lambda: with_weight(torch.zeros(64, 32, dtype=torch.complex64)),
    f"{NAME} is a Special": lambda: with_weight(Special(torch.zeros(64, 32))),
    r"2 parameters \(optimizer.0.0 of shape \(5, 32\), .* lacks head.weight": with_another_head,
    r'parameter enter\.weight is torch\.bfloat16.*"bf16"': in_16_bits,
    r"blocks\.1\.table is a sparse_coo": lambda: with_table(torch.eye(3).to_sparse()),
    r"blocks\.1\.table is a sparse_csr": lambda: with_table(torch.eye(3).to_sparse_csr()),
    r"blocks\.1\.table is a nested": lambda: with_table(
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    ),
}


@in_one_item([*itertools.product(MODELS, (0, 3))])
def test_models_that_are_refused(case):
    words, stage = case
    model, optimizer = MODELS[words]()
    with pytest.raises((PartitionError, ConfigError), match=words):
        start(model, optimizer, config_of(stage))
    assert plain(model)


def test_a_lazy_parameter():
    model = stack()
    model.head = nn.LazyLinear(5)
    with pytest.raises((PartitionError, ValueError), match=r"head\.weight|uninitialized"):
        start(model, None, config_of(1))


def test_a_device_whose_tensors_torch_does_not_put_into_a_parameter(monkeypatch):
    """Tensors of PrivateUse1 backends are refused by torch; those of CUDA are not."""
    specs, _ = find_units(stack())
    check_parameters(specs, torch.device("cpu"))
    monkeypatch.setattr(torch, "empty", lambda size, device: torch.zeros(size))
    monkeypatch.setattr(torch, "_has_compatible_shallow_copy_type", lambda one, other: False)
    with pytest.raises(PartitionError, match="is on cpu, and torch cannot move it to 'xpu'"):
        check_parameters(specs, torch.device("xpu"))


def _other_name(model):
    model.tail, model.head = model.head, nn.Identity()


@in_turn("stage, different", [(1, "dtype"), (2, "group"), (3, "name")])
@on_each_rank(2)
def test_ranks_that_hold_different_models(rank, model, stage, different):
    if rank == 1 and different != "group":
        model.head.double() if different == "dtype" else _other_name(model)
    groups = [{"params": list(model.parameters())}]
    if rank == 1 and different == "group":
        rest = [*model.enter.parameters(), *model.blocks.parameters()]
        groups = [{"params": list(model.head.parameters())}, {"params": rest}]
    with pytest.raises(RankMismatchError, match="ranks 0 and 1 hold different models") as told:
        start(model, torch.optim.SGD(groups, lr=0.1), config_of(stage))
    assert "head" in str(told.value) or different == "group"


class OnOneRank:
    """A source of which ranks other than 0 read nothing, and whose disk may fail."""

    dtype, sliceable = torch.float32, False

    def __init__(self, rank: int, fails: bool):
        self.rank, self.fails = rank, fails

    def whole(self) -> torch.Tensor:
        assert self.rank == 0
        if self.fails:
            raise OSError(5, "Input/output error")
        return torch.full((64, 32), 2.0)


@in_turn("stage, fails", [(2, True), (3, True), (3, False)])
@on_each_rank(2)
def test_a_weight_that_stays_whole_is_read_by_one_rank(rank, model, stage, fails):
    """Where it cannot, all ranks are told."""
    model.blocks[1].up.weight = pending((64, 32), OnOneRank(rank, fails))
    zero = {"stage": stage, "stage3_param_persistence_threshold": 10**6}
    config = config_of(stage, zero_optimization=zero)
    if fails:
        with pytest.raises((OSError, RankMismatchError), match="Input/output error"):
            start(model, None, config)
    else:
        engine = start(model, None, config)
        assert dict(engine.consolidated())["blocks.1.up.weight"].eq(2).all()


def test_a_model_that_has_an_engine_already():
    model = stack()
    engine = start(model, adamw(model), config_of(3))
    with pytest.raises(HfZeroError, match="destroy"):
        start(model, None, config_of(2))
    engine.destroy()
    start(model, None, config_of(2))


class Shifted(nn.Module):
    """A layer behind an operation with a buffer."""

    def __init__(self, layer):
        super().__init__()
        self.first, self.layer = nn.Linear(6, 6), layer
        self.register_buffer("shift", torch.ones(6))

    def forward(self, x):
        return self.layer((self.first(x) + self.shift).reshape(-1, 2, 3)).float().square().mean()


@in_turn("stage, precision", [(0, "fp16"), (1, "bf16"), (3, "bf16")])
def test_16_bits_and_a_buffer_in_fp32(stage, precision):
    x = torch.randn(4, 6).to({"fp16": torch.float16, "bf16": torch.bfloat16}[precision])
    for layer in (nn.Linear(3, 2), nn.LayerNorm(3), nn.Conv1d(2, 2, 1)):
        model = Shifted(copy.deepcopy(layer))
        config = config_of(stage, **{precision: {"enabled": True}})
        engine = start(model, plain_sgd(model), config)
        words = (
            rf"layer \({type(layer).__name__}\) .* shift \(float32\)\. .*buffer_dtype\W+{precision}"
        )
        with pytest.raises(PartitionError, match=words):
            engine(x)
        engine.destroy()
        model = Shifted(copy.deepcopy(layer))
        config["data_types"] = {"buffer_dtype": precision}
        engine = start(model, plain_sgd(model), config)
        engine.backward(engine(x))
        engine.step()
        engine.destroy()
    model = Shifted(nn.Linear(3, 2))
    model.shift = None
    engine = start(model, plain_sgd(model), {**config, "keep_in_fp32_modules": ["first"]})
    with pytest.raises(PartitionError, match=r"first \(Linear\) .* first\.weight \(float32\)"):
        engine(x)
