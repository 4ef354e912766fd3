"""Optimizers on segments of flat shards do what they do on whole parameters."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_zero.errors import PartitionError, UnsupportedOptimizerError
from hf_zero.optim import CPUSGD, Adam, CPUAdagrad, CPUAdam, CPULion, Lion
from hf_zero.optim.bound_optimizer import BoundOptimizer
from hf_zero.optim.elementwise import ELEMENTWISE
from hf_zero.optim.segments import cut
from tests.helpers.cells import in_one_item
from tests.helpers.flats import ShardFlat, shard

CASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"betas": (0.8, 0.95)}),
    "Adam-amsgrad-maximize": (torch.optim.Adam, {"amsgrad": True, "maximize": True}),
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW-amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "Adamax": (torch.optim.Adamax, {}),
    "ASGD": (torch.optim.ASGD, {"t0": 2}),
    "NAdam": (torch.optim.NAdam, {"decoupled_weight_decay": True}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {}),
    "SGD": (torch.optim.SGD, {}),
    "SGD-momentum": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3}),
    "SGD-nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Lion": (Lion, {}),
    "CPUAdam-amsgrad": (CPUAdam, {"amsgrad": True, "weight_decay": 0.1}),
    "CPUAdam-coupled": (CPUAdam, {"adamw_mode": False, "maximize": True}),
    "CPULion": (CPULion, {}),
    "CPUAdagrad": (CPUAdagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.01}),
    "CPUSGD-momentum": (CPUSGD, {"momentum": 0.9, "dampening": 0.3}),
}
# Their formulas are those of a class of CASES, which they extend by a setting.
EXTENDED = {Adam}


def test_each_elementwise_class_has_a_case():
    without = {*ELEMENTWISE} - {cls for cls, _ in CASES.values()} - EXTENDED
    assert not without, f"add them to CASES: {without}"


FUSED = ["Adagrad", "Adam", "Adam-amsgrad-maximize", "AdamW", "AdamW-amsgrad"]
FUSED += ["SGD", "SGD-momentum", "SGD-nesterov"]
UNITS = [
    {"a.weight": (3, 5), "a.bias": (7,), "a.scale": ()},
    {"b.weight": (11, 3), "b.none": (0, 3), "b.bias": (2,)},
]
GROUP_OF = {"a.weight": 0, "a.bias": 1, "a.scale": 1, "b.weight": 0, "b.none": 0, "b.bias": 1}


@dataclass
class World:
    """Whole parameters with a plain optimizer, and the same over imagined ranks."""

    case: str
    whole: dict[str, torch.nn.Parameter]
    plain: torch.optim.Optimizer
    ranks: list[list[ShardFlat]]
    bound: list[BoundOptimizer]
    seed: int = 0

    def gradients(self, scale=1.0):
        generator = torch.Generator().manual_seed(self.seed)
        self.seed += 1
        for parameter in self.whole.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        scaled = {name: parameter.grad * scale for name, parameter in self.whole.items()}
        for flats in self.ranks:
            for flat in flats:
                flat.write(scaled, flat.gradient.shard)

    def step(self, scale=None):
        self.gradients(1.0 if scale is None else scale)
        self.plain.step()
        for bound in self.bound:
            bound.step(None if scale is None else torch.tensor(scale))

    def sharded(self, name="master"):
        out = {key: torch.zeros_like(parameter.data) for key, parameter in self.whole.items()}
        for flats, bound in zip(self.ranks, self.bound):
            for flat in flats:
                flat.read(bound.state.tensors(flat)[name], out)
        return out

    def assert_equal(self, **tolerance):
        close = tolerance or {"rtol": 0, "atol": 0}
        for name, tensor in self.sharded().items():
            told = lambda said, name=name: f"{name}: {said}"  # noqa: E731
            torch.testing.assert_close(tensor, self.whole[name].data, **close, msg=told)


def make(case, parameters, group_of, groups, **more):
    cls, options = CASES[case]
    options = {**options, **more}
    if "foreach" not in inspect.signature(cls).parameters:
        options.pop("foreach", None)  # one loop is all it has
    settings: list[dict[str, Any]] = [{"lr": 0.01}, {"lr": 0.003}, {"lr": 0.03}][:groups]
    if cls is not torch.optim.Rprop:
        settings[0]["weight_decay"] = 0.1
    return cls(
        [
            {"params": [p for n, p in parameters.items() if group_of[n] == g], **extra}
            for g, extra in enumerate(settings)
        ],
        **options,
    )


def world(case, shards=3, units=None, group_of=None, together=True, steps_before=0, **options):
    units, group_of = units or UNITS, group_of or GROUP_OF
    grad_dtype = options.pop("grad_dtype", torch.float32)
    groups = max(group_of.values()) + 1
    shapes = [each for unit in units for each in unit.items()]
    whole = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes}
    plain = make(case, whole, group_of, groups, foreach=options.get("foreach"), **unfused(case))
    copies = [
        {name: torch.nn.Parameter(p.detach().clone()) for name, p in whole.items()}
        for _ in range(shards)
    ]
    optimizers = [make(case, copy, group_of, groups, **options) for copy in copies]
    generator = torch.Generator().manual_seed(99)
    for _ in range(steps_before):
        gradients = {name: torch.randn(p.shape, generator=generator) for name, p in whole.items()}
        for parameters, optimizer in [(whole, plain), *zip(copies, optimizers)]:
            for name, gradient in gradients.items():
                parameters[name].grad = gradient.clone()
            optimizer.step()
    now = [{name: whole[name].data for name in unit} for unit in units]
    ranks = shard(now, shards, together=together, grad_dtype=grad_dtype)
    bound = [
        BoundOptimizer(o, flats, group_of, copy)
        for o, flats, copy in zip(optimizers, ranks, copies)
    ]
    return World(case, whole, plain, ranks, bound)


def unfused(case):
    return {"fused": False} if case in FUSED else {}


@st.composite
def places(draw):
    groups = draw(st.integers(1, 3))
    units, group_of = [], {}
    for u in range(draw(st.integers(1, 3))):
        shapes = draw(
            st.lists(st.lists(st.integers(0, 6), max_size=2).map(tuple), min_size=1, max_size=4)
        )
        units.append({f"u{u}.p{i}": shape for i, shape in enumerate(shapes)})
        group_of.update({name: draw(st.integers(0, groups - 1)) for name in units[-1]})
    # Every group has a parameter of some size, so that the plain optimizer has all of them too.
    units.append({f"last.{g}": (2,) for g in range(groups)})
    group_of.update({f"last.{g}": g for g in range(groups)})
    return {
        "units": units,
        "group_of": group_of,
        "shards": draw(st.integers(1, 4)),
        "together": draw(st.booleans()),
    }


@settings(max_examples=25, deadline=None)
@given(
    where=places(),
    case=st.sampled_from(sorted(CASES)),
    foreach=st.sampled_from([None, False, True]),
    before=st.sampled_from([0, 2]),
)
def test_sharded_steps_equal_whole_steps_bit_for_bit(where, case, foreach, before):
    """Also where the optimizer has state of steps before."""
    it = world(case, steps_before=before, foreach=foreach, **unfused(case), **where)
    for _ in range(3):
        it.step()
    it.assert_equal()


CLOSE = {"rtol": 1e-5, "atol": 1e-7}


@in_one_item(CASES)
def test_every_class_keeps_its_numbers_on_every_rank(case):
    """Some of four ranks own nothing of a group, and their counters must run all the same."""
    it = world(case, shards=4, units=[{"a.weight": (3, 5)}, {"a.bias": (2,), "a.scale": ()}])
    for _ in range(3):
        it.step()
    expected = it.bound[0].state.scalars.of_groups()
    assert all(bound.state.scalars.of_groups() == expected for bound in it.bound)
    for index, group in enumerate(it.plain.param_groups):
        for name, value in it.plain.state[group["params"][0]].items():
            if not isinstance(value, Tensor) or value.shape != group["params"][0].shape:
                assert expected[index][name] == float(value)
    for fused in (True, False):
        it = world(case, **({} if fused else {"foreach": True, **unfused(case)}))
        if fused and case in FUSED:
            assert all(group["fused"] is True for bound in it.bound for group in bound.groups)
        for _ in range(2):
            it.step(scale=64.0)
        it.assert_equal(**CLOSE)


CHOSEN = [{"fused": False}, {"foreach": True}, {"differentiable": True}, {"capturable": True}, {}]


@in_one_item(CHOSEN)
def test_options_of_the_user(options):
    """Fused stays off where the user chose otherwise."""
    it = world("AdamW", **options)
    if "capturable" not in options:
        assert all(bool(group["fused"]) == (options == {}) for group in it.bound[0].groups)
    it.step()
    it.assert_equal(**CLOSE)
    assert it.bound[0].state.scalars.of_groups()[0] == {"step": 1.0}


@pytest.mark.filterwarnings("error")
def test_schedulers_see_the_step():
    for before in (True, False):
        parameter = torch.nn.Parameter(torch.zeros(4))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        [[flat]] = shard([{"p": parameter.data}], 1, together=True)
        made = torch.optim.lr_scheduler.StepLR(optimizer, 1) if before else None
        bound = BoundOptimizer(optimizer, [flat], {"p": 0}, {"p": parameter})
        scheduler = made or torch.optim.lr_scheduler.StepLR(optimizer, 1)
        bound.step()
        scheduler.step()
        bound.step()
        scheduler.step()


def test_hooks_and_wrappers_of_the_user_run_once_a_step_and_not_for_a_load():
    it = world("AdamW", shards=1)
    bound, calls = it.bound[0], []
    bound.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    bound.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    bound.optimizer.step = lambda *_: calls.append("what the engine put there")  # type: ignore[method-assign,assignment,func-returns-value]
    bound.state.scalars.load({key: {"step": 3.0} for key in GROUP_OF})
    assert calls == []
    it.step()
    assert calls == ["before", "after"]
    assert bound.state.scalars.of_groups() == [{"step": 4.0}, {"step": 4.0}]


def test_frozen_flats_and_ungrouped_parameters_are_left_alone():
    it = world("SGD", shards=2)
    flats = it.ranks[0]
    flats[0].trainable = False
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in UNITS[1].items()}
    optimizer = torch.optim.SGD([parameters["b.weight"]], lr=1.0)
    bound = BoundOptimizer(optimizer, flats, {"b.weight": 0}, parameters)
    for flat in flats:
        flat.gradient.shard = torch.ones_like(flat.master)
    before = [flat.master.clone() for flat in flats]
    bound.step()
    assert torch.equal(flats[0].master, before[0])
    run = bound._table.segments[0].tensor.numel()
    assert run < flats[1].master.numel() or flats[1].layout.num_shards > 1
    assert torch.equal(flats[1].master[:run], before[1][:run] - 1.0)
    assert torch.equal(flats[1].master[run:], before[1][run:])
    flats[0].trainable, flats[0].master = True, None
    with pytest.raises(PartitionError, match="unit0"):
        cut(flats, GROUP_OF)


@in_one_item(CASES)
def test_saved_state_continues_exactly_on_another_number_of_ranks(case):
    together = [*CASES].index(case) % 2 == 0
    one = world(case, shards=3, together=together, foreach=False, **unfused(case))
    two = world(case, shards=2, together=together, foreach=False, **unfused(case))
    for _ in range(3):
        one.step()
    scalars = one.bound[-1].state.scalars.of_groups()
    settings_ = json.loads(json.dumps(one.bound[0].settings.hyperparameters()))
    for name in sorted(one.bound[0].state.tensors(one.ranks[0][0])):
        whole = one.sharded(name)
        for flats, bound in zip(two.ranks, two.bound):
            for flat in flats:
                chunk = torch.zeros_like(flat.master)
                flat.write(whole, chunk)
                bound.state.load_tensor(flat, name, chunk)
    for bound in two.bound:
        bound.state.scalars.load({n: scalars[group] for n, group in GROUP_OF.items()})
        bound.settings.load(settings_)
        assert bound.state.scalars.of_groups() == scalars
    two.whole, two.plain, two.seed = one.whole, one.plain, one.seed
    for _ in range(2):
        two.step()
    two.assert_equal()


def test_state_before_the_first_step_and_views_that_may_be_written():
    """What is created starts where the class starts."""
    it = world("AdamW", shards=1)
    bound, flat = it.bound[0], it.ranks[0][0]
    assert set(bound.state.tensors(flat)) == {"master"}
    assert bound.state.scalars.of_groups() == [{}, {}]
    bound.state.scalars.load({key: {} for key in GROUP_OF})
    assert bound.state.scalars.of_groups() == [{}, {}]
    bound.state.load_tensor(flat, "exp_avg", torch.ones_like(flat.master))
    found, again = bound.state.tensors(flat), bound.state.tensors(flat)
    assert found["master"].data_ptr() == flat.master.data_ptr()
    for name, value in (("exp_avg", 1.0), ("exp_avg_sq", 0.0)):
        assert torch.equal(found[name], torch.full_like(flat.master, value))
        assert again[name].data_ptr() == found[name].data_ptr()
    assert bound.state.scalars.of_groups() == [{"step": 0.0}, {"step": 0.0}]
    it = world("Adagrad", shards=1, together=False)
    for state in it.bound[0].optimizer.state.values():
        assert torch.all(state["sum"] == 0.1)
    it = world("Rprop", shards=1)
    flat = it.ranks[0][0]
    it.bound[0].state.load_tensor(flat, "prev", torch.zeros_like(flat.master))
    step_sizes = it.bound[0].state.tensors(flat)["step_size"]
    torch.testing.assert_close(step_sizes.unique(), torch.tensor([0.003, 0.01]))


def test_state_of_another_optimizer_is_refused():
    it = world("SGD-momentum", shards=1)
    bound, flat = it.bound[0], it.ranks[0][0]
    zeros = torch.zeros_like(flat.master)
    for call, said in (
        (
            lambda: bound.state.load_tensor(flat, "exp_avg", zeros),
            "SGD keeps no state 'exp_avg' .*unit0",
        ),
        (
            lambda: bound.state.scalars.load({key: {"step": 1.0} for key in GROUP_OF}),
            "no number 'step' in group 0",
        ),
        (lambda: bound.settings.load([{}, {}, {}]), "hyperparameters of 3 groups"),
    ):
        with pytest.raises(UnsupportedOptimizerError, match=said):
            call()


def test_hyperparameters_are_json_and_keep_their_form():
    parameter = torch.nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(0.1), fused=True)
    group = optimizer.param_groups[0]
    group["note"], group["milestones"] = (lambda: None), [1, 2]
    [[flat]] = shard([{"p": parameter.data}], 1, together=True)
    bound = BoundOptimizer(optimizer, [flat], {"p": 0}, {"p": parameter})
    saved = json.loads(json.dumps(bound.settings.hyperparameters()))
    flags = {"amsgrad", "maximize", "decoupled_weight_decay", "milestones"}
    assert set(saved[0]) == {"lr", "betas", "eps", "weight_decay"} | flags
    saved[0].update(lr=0.25, betas=[0.5, 0.75], initial_lr=0.5, fused=False)
    lr = group["lr"]
    bound.settings.load(saved)
    assert group is optimizer.param_groups[0] and group["lr"] is lr and lr.item() == 0.25
    assert group["betas"] == (0.5, 0.75) and group["initial_lr"] == 0.5 and group["fused"] is True
