"""State an optimizer already has when it is bound: carried over, or refused with the reason and
without a change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from hf_zero.checkpoint.memory.slot_files import TensorVersion, state_version
from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.optim.bound_optimizer import BoundOptimizer
from hf_zero.optim.initial_state import counted_elsewhere, initial_state
from hf_zero.optim.segment_entries import is_elementwise, is_scalar
from tests.helpers.cells import in_one_item
from tests.helpers.flats import shard

SHAPES: dict[str, tuple[int, ...]] = {"w": (4, 5), "b": (3,), "s": ()}


def stepped(cls, parameters, **options):
    optimizer = cls(list(parameters.values()), **options)
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def fresh():
    return {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}


def bind(optimizer, parameters, known=None):
    [flats] = shard([{name: p.data for name, p in parameters.items()}], 1, together=True)
    return BoundOptimizer(
        optimizer, flats, dict.fromkeys(parameters, 0), parameters if known is None else known
    )


def test_the_states_of_one_step_arrive_in_place_and_the_old_ones_go():
    """In fp32, also those of 16 bits."""
    for dtype in (torch.float32, torch.bfloat16):
        parameters = {name: torch.nn.Parameter(p.data.to(dtype)) for name, p in fresh().items()}
        optimizer = stepped(torch.optim.AdamW, parameters)
        moments = [optimizer.state[p]["exp_avg"].float().reshape(-1) for p in parameters.values()]
        bound = bind(optimizer, parameters)
        assert len(bound._table.segments) == 1
        members = optimizer.param_groups[0]["params"]
        assert [p.shape for p in members] == [p.shape for p in parameters.values()]
        assert list(map(id, optimizer.state)) == list(map(id, members))
        for member, moment in zip(members, moments):
            kept = optimizer.state[member]["exp_avg"]
            assert kept.dtype == torch.float32 and torch.equal(kept.reshape(-1), moment)
        assert bound.state.scalars.of_groups() == [{"step": 1.0}]


Adam, SGD = torch.optim.Adam, torch.optim.SGD
OWN = r"Adam keeps state 'row_mean' for parameter 'w' .* as "
# class; what becomes of the state of one step and of the parameters that are known; the refusal
SPOILT: list[tuple[Any, Callable[[Any, Any], object], str]] = [
    (Adam, lambda state, p: state[p["w"]].update(row_mean="text"), OWN + "a str"),
    (
        Adam,
        lambda state, p: state[p["w"]].update(row_mean=torch.zeros(4)),
        OWN + "a tensor of",
    ),
    (Adam, lambda state, p: p.pop("b"), r"a tensor of shape \(3,\), which is not a parameter"),
    (Adam, lambda state, p: state.update(extra={"x": 1}), "state for 'extra', which is"),
]


@in_one_item(SPOILT, lambda row: row[2])
def test_state_that_does_not_fit_is_refused_and_nothing_changes(row):
    cls, spoil, said = row
    known = fresh()
    parameters = dict(known)
    optimizer = stepped(cls, parameters, lr=0.1, **({"momentum": 0.9} if cls is SGD else {}))
    spoil(optimizer.state, known)
    before = {key: dict(state) for key, state in optimizer.state.items()}
    with pytest.raises(UnsupportedOptimizerError, match=said):
        bind(optimizer, parameters, known)
    assert {key: dict(state) for key, state in optimizer.state.items()} == before
    group = optimizer.param_groups[0]["params"]
    assert [id(p) for p in group] == [id(p) for p in parameters.values()]


class PythonCounters(torch.optim.Optimizer):
    """In the style of older libraries: its counters are Python numbers."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, warm=True, average=torch.zeros_like(p))
                state["step"] += 1
                state["average"].lerp_(p.grad, 1 / state["step"])
                p.sub_(state["average"], alpha=group["lr"])


def test_an_optimizer_the_user_vouches_for_runs_with_python_counters():
    parameters = fresh()
    optimizer = stepped(PythonCounters, parameters)
    twins = {name: torch.nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
    plain = PythonCounters(twins.values())
    for name, p in twins.items():
        plain.state[p].update(
            step=1, warm=True, average=optimizer.state[parameters[name]]["average"].clone()
        )
    [flats] = shard([{name: p.data for name, p in parameters.items()}], 1, together=True)
    bound = BoundOptimizer(optimizer, flats, dict.fromkeys(parameters, 0), parameters)
    gradients = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    for name, p in twins.items():
        p.grad = gradients[name]
    assert flats[0].gradient.shard is not None
    flats[0].write(
        {name: 2 * gradient for name, gradient in gradients.items()}, flats[0].gradient.shard
    )
    plain.step()
    bound.step(torch.tensor(2.0))
    out = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    flats[0].read(bound.state.tensors(flats[0])["master"], out)
    assert all(torch.equal(out[name], p) for name, p in twins.items())
    assert bound.state.scalars.of_groups() == [{"step": 2.0, "warm": 1.0}]
    bound.state.scalars.load({key: {"step": 7.0, "warm": 0.0} for key in parameters})
    state = next(iter(optimizer.state.values()))
    assert state["step"] == 7 and type(state["step"]) is int and state["warm"] is False


class RowMeans(PythonCounters):
    """Claims to be element-wise, and keeps something of another size."""

    def step(self, closure=None):  # type: ignore[override]
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["means"] = torch.zeros(2)


def test_a_class_that_only_claims_to_be_element_wise_is_found_out_at_its_first_step():
    bind(RowMeans(fresh().values()), {}).step()
    parameters = fresh()
    bound = bind(RowMeans(parameters.values()), parameters)
    said = r"RowMeans keeps state 'means' for a "
    with pytest.raises(UnsupportedOptimizerError, match=said + "segment of 'unit0"):
        bound.step()
    with pytest.raises(UnsupportedOptimizerError, match=said + r"parameter of shape \(1,\)"):
        bound = bind(RowMeans(parameters.values()), parameters)
        bound.state.scalars.load({key: {"step": 1.0} for key in parameters})
    one = torch.tensor(1.0)
    assert is_scalar("step", one, ()) and not is_elementwise("step", one, ())
    assert is_elementwise("exp_avg", one, ()) and not is_scalar("exp_avg", one, ())
    assert is_scalar("count", torch.tensor([1.0]), (3,)) and is_scalar("count", 2, (1,))
    assert is_elementwise("exp_avg", torch.zeros(1), (1,))
    assert is_elementwise("exp_avg", torch.zeros(0, 3), (0, 3))


def test_hooks_of_all_optimizers_see_no_step_of_a_throw_away_one():
    optimizer, seen = stepped(torch.optim.AdamW, fresh()), []
    hooks = [
        register(lambda optimizer, *_: seen.append(optimizer))
        for register in (
            torch_optimizer.register_optimizer_step_pre_hook,
            torch_optimizer.register_optimizer_step_post_hook,
        )
    ]
    try:
        group = optimizer.param_groups[0]
        assert set(initial_state(optimizer, group, torch.zeros(1))) > {"exp_avg", "exp_avg_sq"}
        assert counted_elsewhere(optimizer, group) == []
    finally:
        for hook in hooks:
            hook.remove()
    assert seen == []


class CountsOutside(torch.optim.SGD):
    """One that the engine does not know, which counts its steps outside of its state."""

    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        self.by_object, self.in_place = 0, torch.zeros(())

    def step(self, closure=None):  # type: ignore[override]
        super().step()
        self.by_object += 1
        self.in_place += 1
        for group in self.param_groups:
            group["by_group"] = group.get("by_group", 0) + 1


def test_a_count_outside_of_the_state_is_found_and_settings_are_none():
    """With capturable settings too, which the throw-away twin has not on the host."""
    optimizer = CountsOutside(fresh().values(), lr=0.1)
    optimizer.param_groups[0]["capturable"] = True
    found = counted_elsewhere(optimizer, optimizer.param_groups[0])
    assert sorted(found) == ["by_group", "by_object", "in_place"]
    assert optimizer.by_object == 0 and optimizer.in_place == 0  # those of the user's object
    optimizer = torch.optim.AdamW(fresh().values(), capturable=True)
    assert counted_elsewhere(optimizer, optimizer.param_groups[0]) == []


def test_the_version_of_state_tells_each_change():
    parameters = fresh()
    optimizer = stepped(torch.optim.AdamW, parameters)
    state = bind(optimizer, parameters).state
    [live] = state.table.entries.states.values()

    def write(name, value):
        live[name] = value

    changes = [
        lambda: live["exp_avg"].mul_(1.0),
        lambda: write("exp_avg", live["exp_avg"].clone()),
        lambda: write("step", 7.0),  # a class may keep a number that is no tensor
        lambda: write("step", 8.0),
        lambda: state.scalars.load({name: {"step": 9.0} for name in SHAPES}),
        lambda: live.pop("exp_avg_sq"),
    ]
    for change in changes:
        before = state_version(state)
        assert state_version(state) == before
        change()
        assert state_version(state) != before


def test_the_version_of_a_freed_tensor_equals_no_other():
    tensor = torch.zeros(1)
    first, same = TensorVersion(tensor), TensorVersion(tensor)
    assert first == same and first != TensorVersion(torch.zeros(1))
    del tensor
    assert first != TensorVersion(torch.zeros(1)) and first != same and first != 0
