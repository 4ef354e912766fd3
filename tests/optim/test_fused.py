"""One launch for all segments: equal to the optimizer's own step over the same flats; state,
hooks and fallbacks as torch has them.
"""

from __future__ import annotations

import copy

import pytest
import torch

from hf_zero.ops import dispatch
from hf_zero.optim import Adam, fused
from hf_zero.optim.bound_optimizer import BoundOptimizer
from hf_zero.optim.lion import Lion
from tests.helpers.flats import shard

UNITS = [
    {"a.weight": (5, 7), "a.bias": (7,)},
    {"b.weight": (3, 4), "b.bias": (4,), "b.scale": (1,)},
    {"c.weight": (40,), "c.bias": (2,)},
]
GROUP_OF = {name: int("bias" in name) for unit in UNITS for name in unit}


@pytest.fixture
def forced(monkeypatch, checked_triton):
    """Kernels run, in the checked interpreter; the list grows by a name at each launch."""
    launched: list[str] = []
    monkeypatch.delenv("HF_ZERO_TRITON", raising=False)
    monkeypatch.setattr(
        dispatch,
        "wanted",
        lambda name, kernels, device: kernels != "off" and dispatch.runs_on(device),
    )
    load = dispatch._load

    def note(launch):
        launched.append(launch.partition(":")[2])
        return load(launch)

    monkeypatch.setattr(dispatch, "_load", note)
    return launched


def adamw(groups):
    settings = {"lr": 1e-2, "weight_decay": 0.1}, {"lr": 3e-3, "weight_decay": 0.0}
    return torch.optim.AdamW([{**group, **own} for group, own in zip(groups, settings)])


def adam(groups):
    own = {"betas": (0.8, 0.9)}
    return torch.optim.Adam(
        [{**groups[0], **own}, groups[1]], lr=1e-2, weight_decay=0.1, maximize=True
    )


def uncorrected(groups):
    return Adam(groups, lr=1e-2, weight_decay=0.1, bias_correction=False)


def lion(groups):
    return Lion([{**groups[0], "weight_decay": 0.1}, groups[1]], lr=1e-3)


class Bound:
    """One rank's flats and a bound optimizer."""

    def __init__(self, make, kernels, shards=1, rank=0, together=True, grad_dtype=torch.float32):
        torch.manual_seed(5)
        units = [{name: torch.randn(shape) for name, shape in unit.items()} for unit in UNITS]
        self.flats = shard(units, shards, together=together, grad_dtype=grad_dtype)[rank]
        named = [each for unit in units for each in unit.items()]
        parameters = {name: torch.nn.Parameter(tensor) for name, tensor in named}
        groups = [{"params": []}, {"params": []}]
        for name, parameter in parameters.items():
            groups[GROUP_OF[name]]["params"].append(parameter)
        self.optimizer = make(groups)
        self.bound = BoundOptimizer(self.optimizer, self.flats, GROUP_OF, parameters, kernels)

    def step(self, seed, **told):
        generator = torch.Generator().manual_seed(seed)
        for flat in self.flats:
            assert flat.gradient.shard is not None
            flat.gradient.shard.copy_(torch.randn(flat.gradient.shard.numel(), generator=generator))
        return self.bound.step(**told)

    def everything(self):
        return {
            f"{flat.key} {name}": t.clone()
            for flat in self.flats
            for name, t in self.bound.state.tensors(flat).items()
        }


def same(ours, theirs, tolerance=5e-7):
    got, want = ours.everything(), theirs.everything()
    assert set(got) == set(want)
    for name, tensor in want.items():
        told = lambda said, name=name: f"{name}: {said}"  # noqa: E731
        torch.testing.assert_close(got[name], tensor, rtol=tolerance, atol=tolerance, msg=told)
    assert ours.bound.state.scalars.of_groups() == theirs.bound.state.scalars.of_groups()


def pair(make=adamw, **more):
    """What the kernel steps, and what the optimizer steps by itself."""
    return Bound(make, "auto", **more), Bound(make, "off", **more)


CASES = [(adamw, True, 1, 0), (adam, False, 2, 0), (lion, True, 2, 1), (uncorrected, False, 4, 3)]


@pytest.mark.parametrize("make, together, shards, rank", CASES)
def test_equal_to_the_optimizer_s_own_step(make, together, shards, rank, forced):
    """Also where schedulers write a rate, and the rate is a tensor."""

    def with_tensor(groups):
        optimizer = make(groups)
        for group in optimizer.param_groups[1:]:
            group["lr"] = torch.tensor(group["lr"])
        return optimizer

    ours, theirs = pair(with_tensor, shards=shards, rank=rank, together=together)
    called = []
    ours.optimizer.register_step_post_hook(lambda optimizer, *_: called.append(optimizer))
    for seed in range(4):
        for each in (ours, theirs):
            for group in each.optimizer.param_groups:
                group["lr"] *= 0.5
            each.step(seed, grad_scale=torch.tensor(2.5))
        same(ours, theirs)
    launches = 4 if together else 4 * len(ours.flats)
    assert forced.count("lion_" if make is lion else "adam_") == launches
    assert forced.count("advance_") == 4 and called == [ours.optimizer] * 4
    assert make is lion or ours.bound.state.scalars.of_groups()[0]["step"] == 4.0


def test_parts_that_are_stepped_apart_upload_their_rows_once(forced, monkeypatch):
    """As units whose updates run in the backward."""
    uploaded = []
    upload = fused.upload
    monkeypatch.setattr(fused, "upload", lambda *args: uploaded.append(args) or upload(*args))
    ours, theirs = pair(together=False)
    for number in range(4):
        for each in (ours, theirs):
            generator = torch.Generator().manual_seed(number)
            for flat in each.flats:
                flat.gradient.shard.copy_(
                    torch.randn(flat.gradient.shard.numel(), generator=generator)
                )
                each.bound.step_some([flat], number)
        same(ours, theirs)
        assert len(uploaded) == len(ours.flats)


def test_state_that_is_replaced_is_moved_in(forced, monkeypatch):
    """Into one array again, while the kernel runs or gives way for a while."""
    ours, theirs = pair()
    for seed in range(4):
        for each in (ours, theirs):
            for group in each.optimizer.param_groups:
                group["fused"] = seed != 2
            saved = copy.deepcopy(torch.optim.AdamW.state_dict(each.optimizer))
            each.step(seed)
        same(ours, theirs)  # shared counters were parted for a while, and not counted once a tensor
    assert forced.count("adam_") == 3 and ours.bound.state.scalars.of_groups()[0]["step"] == 4.0
    for each in (ours, theirs):
        torch.optim.AdamW.load_state_dict(each.optimizer, copy.deepcopy(saved))
        each.bound.state.scalars.note_load(each.bound.state.scalars.of_groups())
    ours.bound._fused._slices = {}
    ours.step(4)
    assert forced.count("adam_") == 4
    states = [state["exp_avg"] for state in ours.optimizer.state.values()]
    assert len({state.untyped_storage().data_ptr() for state in states}) == 1
    theirs.step(4)
    for each in (ours, theirs):
        flat = each.flats[0]
        each.bound.state.load_tensor(flat, "exp_avg", torch.full_like(flat.master, 0.25))
        each.bound.state.scalars.load({key: {"step": 7.0} for key in GROUP_OF})
        each.step(5)
    same(ours, theirs)
    assert ours.bound.state.scalars.of_groups()[1]["step"] == 8.0
    for each in (ours, theirs):
        each.bound.state.forget()
        each.step(6)
    same(ours, theirs)
    monkeypatch.setitem(dispatch._BROKEN, "flat_adam", "RuntimeError: PassManager")
    for each in (ours, theirs):
        each.step(7)
    same(ours, theirs)
    assert forced.count("adam_") == 6


def counts(bound):
    """The step counts of the parameters that begin segments."""
    state = bound._table.entries.states
    return {min(s.names): float(state[s.tensor]["step"]) for s in bound._table.segments}


LATE = [{"c.weight": 2.0}, {"c.weight": None}, {"a.weight": 2.0}]


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("late", LATE)
def test_counts_of_whole_segments_that_differ_in_a_load_stay_apart(late, begun, forced):
    """Also in an engine whose launches have shared counters."""
    ours, theirs = pair(together=False)
    steps = dict.fromkeys(GROUP_OF, 3.0) | late
    numbers = {name: step and {"step": step} for name, step in steps.items()}
    for each in (ours, theirs):
        if begun:
            each.step(1)
        for flat in each.flats:
            for name in ("exp_avg", "exp_avg_sq"):
                each.bound.state.load_tensor(flat, name, torch.full_like(flat.master, 0.01))
        each.bound.state.scalars.load(numbers)
        assert not ours.bound.repeats_launch()
        each.step(0)
    same(ours, theirs)
    assert counts(ours.bound) == counts(theirs.bound) and "adam_" in forced


@pytest.mark.parametrize("together", [False, True])
def test_counts_stay_apart_after_the_optimizer_s_own_step_leaves_segments_out(together, forced):
    """A hook makes the optimizer step by itself, with whole segments or parts of them unused."""
    ours, theirs = pair(together=together)
    for each in (ours, theirs):
        each.step(0)
        hook = each.optimizer.register_step_pre_hook(lambda *_: None)
        each.flats[2].gradient.unused = frozenset({"c.weight", "c.bias"})
        each.step(1)
        hook.remove()
        each.flats[2].gradient.unused = frozenset()
        each.step(2)
    same(ours, theirs)
    assert counts(ours.bound) == counts(theirs.bound)
    assert counts(ours.bound)["c.weight"] == 2.0 and counts(ours.bound)["a.weight"] == 3.0


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("counted", [("c.weight", "c.bias"), ("b.bias", "b.scale")])
def test_what_other_code_updates_is_only_counted(counted, together, forced):
    """By launches with shared counters and by the optimizer, from the first step on or later."""
    names = frozenset(counted)

    def kept(bound):
        segments = [s for s in bound._table.segments if names.issuperset(s.names)]
        return [s.tensor.clone() for s in segments] + [
            bound._table.entries.states[s.tensor]["exp_avg"].clone() for s in segments
        ]

    for make in pair(together=together):
        for at, later in enumerate((frozenset(), names, names, frozenset())):
            make.bound.count_only(later)
            before = kept(make.bound) if later else []
            make.step(at)
            assert all(map(torch.equal, kept(make.bound), before)), at
            assert set(counts(make.bound).values()) == {at + 1.0}
            assert bool(before) == (at in (1, 2))
    fresh = Bound(adamw, "auto", together=together)
    fresh.bound.count_only(names)
    fresh.step(0)
    assert set(counts(fresh.bound).values()) == {1.0} and "adam_" in forced


def test_a_state_dict_with_other_counts_is_moved_in_apart(forced):
    """torch's own ``load_state_dict``, which writes entries past the engine."""
    ours, theirs = pair(together=False)
    for each in (ours, theirs):
        each.step(0)
        saved = copy.deepcopy(torch.optim.AdamW.state_dict(each.optimizer))
        saved["state"][0]["step"] = torch.tensor(5.0)
        torch.optim.AdamW.load_state_dict(each.optimizer, saved)
        each.step(1)
    same(ours, theirs)
    assert counts(ours.bound) == counts(theirs.bound) and 6.0 in counts(ours.bound).values()


@pytest.mark.parametrize("together", [False, True])
def test_a_load_of_equal_counts_lets_a_group_count_once_again(together, forced):
    """So that a captured graph can replay the steps again."""
    ours, theirs = pair(together=together)
    for each in (ours, theirs):
        each.step(0)
        each.flats[2].gradient.unused = frozenset({"c.weight"})
        each.step(1)
        each.flats[2].gradient.unused = frozenset()
        assert not each.bound.repeats_launch()
        each.bound.state.scalars.load({name: {"step": 7.0} for name in GROUP_OF})
        each.step(2)
    assert ours.bound.repeats_launch()
    same(ours, theirs)
    assert counts(ours.bound) == counts(theirs.bound) and {*counts(ours.bound).values()} == {8.0}
    before = ours.bound.prepare_launch({})
    ours.bound.state.scalars.load({name: {"step": 9.0} for name in GROUP_OF})
    after = ours.bound.prepare_launch({})
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(after, before, strict=True))


OPTIONS = {"amsgrad": {"amsgrad": True}, "foreach": {"foreach": True}, "unfused": {"fused": False}}
UNKNOWN = (*OPTIONS, "hook", "subclass", "wrapped", "gradient", "off")


def test_what_the_kernel_does_not_know_is_left_to_the_optimizer(forced):
    class Sub(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    def make(groups, change):
        kind = Sub if change == "subclass" else torch.optim.AdamW
        optimizer = kind(groups, lr=1e-2, **OPTIONS.get(change, {}))
        if change == "hook":
            optimizer.register_step_pre_hook(lambda *_: None)
        if change == "wrapped":
            own = optimizer.step
            optimizer.step = lambda: own()
        return optimizer

    for change in UNKNOWN:
        make_it = lambda groups, change=change: make(groups, change)  # noqa: E731
        ours = Bound(make_it, "off" if change == "off" else "auto")
        if change == "gradient":
            ours.flats[0].gradient.shard = None
            assert ours.bound.step() == set()
        else:
            assert ours.step(0) == set(), change
        assert "adam_" not in forced, change
        assert ours.bound.state.scalars.of_groups()[0]["step"] == 1.0


WANTED = [
    *(("off", "cuda", False), (None, "cuda", False), ("auto", "cuda", True), ("on", "cuda", True)),
    *((("optimizer",), "cuda", True), (("norms",), "cuda", False), ("auto", "cpu", False)),
    *((("optimizer", "norms"), "cpu", True), ("off", "cpu", False)),
]


def test_what_the_configuration_asks_for(monkeypatch):
    for runs in (True, False):
        monkeypatch.setattr(dispatch, "runs_on", lambda device, runs=runs: runs)
        for kernels, device, want in WANTED:
            found = dispatch.wanted("optimizer", kernels, torch.device(device))
            assert found is (want and runs), (kernels, device)
