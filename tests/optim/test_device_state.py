"""State on the device: arrays by flat buffer, of which ``optimizer.state`` has slices."""

from __future__ import annotations

import pytest
import torch

from hf_zero.errors import PartitionError, UnsupportedOptimizerError
from hf_zero.optim.bound_optimizer import BoundOptimizer
from tests.helpers.flats import shard

SHAPES = {"a.weight": (3, 5), "a.bias": (7,), "b.weight": (4, 2), "b.bias": (3,)}
UNITS = [["a.weight", "a.bias"], ["b.weight", "b.bias"]]


class Pair:
    """An optimizer over segments of one rank, and one over whole parameters."""

    def __init__(self, make, together=True):
        torch.manual_seed(3)
        values = {name: torch.randn(shape) for name, shape in SHAPES.items()}
        self.whole = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
        self.plain = make(self.whole.values())
        copies = {name: torch.nn.Parameter(value) for name, value in values.items()}
        self.optimizer = make(copies.values())
        units = [{name: copies[name].data for name in unit} for unit in UNITS]
        [self.flats] = shard(units, 1, together=together)
        self.bound = BoundOptimizer(self.optimizer, self.flats, dict.fromkeys(SHAPES, 0), copies)

    def step(self, gradient=torch.randn, unused=()):
        gradients = {name: gradient(shape) for name, shape in SHAPES.items()}
        for name, parameter in self.whole.items():
            parameter.grad = None if name in unused else gradients[name]
        for flat in self.flats:
            flat.write(gradients, flat.gradient.shard)
            flat.gradient.unused = frozenset(unused) & flat.layout.by_name.keys()
        self.plain.step()
        self.bound.step()

    def arrays(self):
        return [self.bound.state.arrays(flat) for flat in self.flats]

    def of(self, name):
        out = {key: torch.zeros(shape) for key, shape in SHAPES.items()}
        for flat, arrays in zip(self.flats, self.arrays()):
            flat.read(arrays[name], out)
        return out

    def assert_equal(self):
        for name, weight in self.of("master").items():
            assert torch.equal(weight, self.whole[name]), name


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, fused=False)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, fused=False)


@pytest.mark.parametrize("together", [True, False])
def test_state_stays_in_memory_that_binding_has_allocated(together):
    """In the first step, in later ones, and in those that leave parameters out."""
    it = Pair(adamw, together)
    flat = it.flats[1]
    places = {tensor.data_ptr() for tensor in it.bound.state.device.memory(flat)}
    assert len(places) == 2 and set(it.bound.state.arrays(flat)) == {"master"}
    for unused in ((), ("b.weight",), ("a.weight", "b.bias"), ()):
        it.step(unused=unused)
        assert {
            it.bound.state.arrays(flat)[name].data_ptr() for name in ("exp_avg", "exp_avg_sq")
        } == places
        it.assert_equal()
    storages = {
        entry["exp_avg"].untyped_storage().data_ptr() for entry in it.optimizer.state.values()
    }
    assert len(storages) == 1


def test_a_reset_leaves_earlier_state_dicts_as_they_are():
    it = Pair(adamw)
    it.step()
    kept = it.optimizer.state_dict()["state"][0]["exp_avg"]
    values = kept.clone()
    it.bound.state.forget()
    it.plain.state.clear()
    it.step()
    it.assert_equal()
    assert torch.equal(kept, values) and values.any()


def test_a_parameter_that_is_used_late_begins_as_in_torch():
    for make in (adamw, sgd, lambda p: torch.optim.Rprop(p, lr=0.05)):
        it = Pair(make)
        for unused in (("a.weight", "b.bias"), ("a.weight",), ()):
            it.step(unused=unused)
            it.assert_equal()
        for name in set(it.plain.state[it.whole["a.weight"]]) - {"step"}:
            for key, values in it.of(name).items():
                assert torch.equal(values, it.plain.state[it.whole[key]][name]), (name, key)


def test_a_first_momentum_has_the_signs_of_the_gradient_s_zeros():
    it = Pair(sgd)
    it.step(gradient=lambda shape: torch.full(shape, -0.0))
    for values in it.of("momentum_buffer").values():
        assert torch.signbit(values).all() and not values.any()


def test_a_hook_before_the_first_step_may_set_the_rate_that_state_begins_with():
    it = Pair(lambda parameters: torch.optim.Rprop(parameters, lr=0.01))
    for optimizer in (it.plain, it.optimizer):
        optimizer.register_step_pre_hook(lambda o, *_: o.param_groups[0].update(lr=0.5))
    it.step()
    it.assert_equal()
    assert all((values == 0.5).all() for values in it.of("step_size").values())


def test_tensors_that_a_script_assigns_are_moved_in():
    it = Pair(adamw)
    it.step()
    places = {
        tensor.data_ptr() for flat in it.flats for tensor in it.bound.state.device.memory(flat)
    }
    for entry in it.optimizer.state.values():
        entry["exp_avg"] = torch.full_like(entry["exp_avg"], 0.25)
    for state in it.plain.state.values():
        state["exp_avg"].fill_(0.25)
    assert all((values == 0.25).all() for values in it.of("exp_avg").values())
    it.step()
    it.assert_equal()
    assert len(places) == len(
        {*it.bound.state.device.memory(it.flats[0]), *it.bound.state.device.memory(it.flats[1])}
    )


def delete(optimizer, name):
    for parameter in [*optimizer.state]:
        del optimizer.state[parameter]


def assign(optimizer, name):
    for entry in optimizer.state.values():
        entry[name] = torch.full_like(entry[name], 0.25)


@pytest.mark.parametrize("change", [delete, assign])
@pytest.mark.parametrize("make", [adamw, sgd])
def test_entries_that_a_script_removes_or_assigns_leave_earlier_state_dicts(make, change):
    it = Pair(make)
    name = "exp_avg" if make is adamw else "momentum_buffer"
    it.step(unused=("b.weight",))
    kept = [entry[name] for entry in it.optimizer.state_dict()["state"].values()]
    values = [tensor.clone() for tensor in kept]
    for optimizer in (it.plain, it.optimizer):
        change(optimizer, name)
    for unused in ((), ("a.bias",)):
        it.step(unused=unused)
        it.assert_equal()
    for tensor, before in zip(kept, values, strict=True):
        assert torch.equal(tensor, before) and before.any()


def test_a_load_joins_what_it_gives_equal_counts():
    """Segments follow from the counts of parameters, and not from cuts before."""
    it = Pair(adamw)
    whole = len(it.bound._table.segments)
    it.step()
    for unused in (("b.weight",), ("a.bias",)):
        it.step(unused=unused)
    assert len(it.bound._table.segments) > whole
    before = [{name: of.clone() for name, of in arrays.items()} for arrays in it.arrays()]
    it.bound.state.scalars.load({key: {"step": 5.0} for key in SHAPES})
    assert len(it.bound._table.segments) == whole
    assert it.bound.state.scalars.reports(str) == [({"step": 5.0}, {})]
    for arrays, former in zip(it.arrays(), before):
        assert all(torch.equal(arrays[name], of) for name, of in former.items())
    for state in it.plain.state.values():
        state["step"].fill_(5.0)
    it.step()
    it.assert_equal()
    it.step(unused=("b.weight",))
    it.bound.state.forget()
    assert len(it.bound._table.segments) == whole


def test_a_load_joins_what_has_begun_and_what_has_not():
    it = Pair(adamw)
    whole = len(it.bound._table.segments)
    it.step(unused=("b.weight",))
    assert len(it.bound._table.segments) > whole
    for flat in it.flats:
        it.bound.state.load_tensor(flat, "exp_avg", torch.full_like(flat.master, 0.5))
    it.bound.state.scalars.load({key: {"step": 5.0} for key in SHAPES})
    assert len(it.bound._table.segments) == whole
    assert all(segment.begun for segment in it.bound._table.segments)


def test_a_load_through_a_view_reaches_parameters_that_have_not_begun():
    it = Pair(adamw)
    it.step(unused=("b.weight",))
    views = it.bound.state.arrays(it.flats[1])
    for name, value in (("exp_avg", 0.25), ("exp_avg_sq", 0.5)):
        views[name].fill_(value)
        it.bound.state.load_tensor(it.flats[1], name, views[name])
    for name, value in (("exp_avg", 0.25), ("exp_avg_sq", 0.5)):
        assert all((it.of(name)[key] == value).all() for key in ("b.weight", "b.bias"))


def test_a_tensor_of_another_shape_is_refused_by_name():
    it = Pair(adamw)
    it.step()
    entry = next(iter(it.optimizer.state.values()))
    before = entry["exp_avg_sq"].clone()
    said = r"\['exp_avg'\] of this rank's part of a.weight was assigned one of torch.float32 and "
    with pytest.raises(PartitionError, match=said + r"shape \(2,\)"):
        entry.update(exp_avg_sq=torch.zeros(3, 5), exp_avg=torch.zeros(2))
    with pytest.raises(PartitionError, match=r"torch\.float64"):
        entry["exp_avg"] = torch.zeros(3, 5, dtype=torch.float64)
    with pytest.raises(UnsupportedOptimizerError, match="'other' for this rank's part"):
        entry["other"] = torch.zeros(2)
    assert torch.equal(entry["exp_avg_sq"], before) and "other" not in entry
    it.step()
    it.assert_equal()
