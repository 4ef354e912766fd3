"""State and settings that an optimizer may have between steps, on the device and offloaded; memory
that goes back; groups of which a rank owns nothing.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import hf_zero
from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.ops import native
from hf_zero.ops.native import Share
from hf_zero.optim import CPUSGD, CPUAdam, Lion
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, start
from tests.helpers.models import seeded
from tests.helpers.offloads import DEVICE, PLACES, ended, offload, opened, same, train, trained
from tests.helpers.stacks import by_hand, on_ranks, run_steps, stack
from tests.helpers.training import adamw


def halves(model, one, other):
    """Two groups, weights and biases, so that each flat has both."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], **one},
        {"params": [p for p in parameters if p.ndim <= 1], **other},
    ]


def rprop(model):
    return torch.optim.Rprop(halves(model, {"lr": 1e-2}, {"lr": 1e-4}))


def adagrad(model):
    return torch.optim.Adagrad(
        halves(model, {"initial_accumulator_value": 0.5}, {"initial_accumulator_value": 0.0}),
        lr=1e-2,
    )


def momentum(kind):
    return lambda model: kind(halves(model, {"lr": 0.1}, {"lr": 0.02}), dampening=0.5)


def dampened(model):
    return torch.optim.SGD(halves(model, {"lr": 0.05}, {"lr": 0.01}), momentum=0.9, dampening=0.3)


def switched_on(step, optimizer):
    """After the first step."""
    optimizer.param_groups[0]["momentum"] = 0.9 if step else 0.0


class Own(torch.optim.Optimizer):
    """A momentum with bias correction that counts steps in its state."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (each for each in group["params"] if each.grad is not None):
                kept = self.state[p]
                if not kept:
                    kept["step"], kept["momentum"] = torch.zeros(()), torch.zeros_like(p)
                kept["step"] += 1
                kept["momentum"].lerp_(p.grad, 0.1)
                p.sub_(kept["momentum"] * group["lr"] / (1 - 0.9 ** float(kept["step"])))


def own(model):
    return Own(halves(model, {}, {}))


def counted(kept, p, rate):
    kept["n"] = kept.get("n", 0) + 1
    p.sub_(p.grad * rate / kept["n"])


def anchored(kept, p, rate):
    kept.setdefault("begin", p.clone())
    p.sub_((p.grad + 0.1 * (p - kept["begin"])) * rate)


def from_the_gradient(kept, p, rate):
    kept.setdefault("momentum", p.grad.clone()).lerp_(p.grad, 0.1)
    p.sub_(kept["momentum"] * rate)


def from_ones(kept, p, rate):
    kept.setdefault("scale", torch.ones_like(p)).mul_(0.5)
    kept["decay"] = kept.get("decay", 1.0) * 0.5
    p.sub_(kept["scale"] * rate / (1 - kept["decay"]))


BEGINS = [counted, anchored, from_the_gradient, from_ones]


class Begun(torch.optim.Optimizer):
    """``update`` begins its state, with what no probe can know."""

    def __init__(self, params, update):
        super().__init__(params, {"lr": 0.1})
        self.update = update

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (each for each in group["params"] if each.grad is not None):
                self.update(self.state[p], p, group["lr"])


class Sums(torch.optim.Adagrad):
    """An Adagrad of one's own: the constructor makes its state."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (each for each in group["params"] if each.grad is not None):
                total = self.state[p]["sum"].addcmul_(p.grad, p.grad)
                p.addcdiv_(p.grad, total.sqrt(), value=-group["lr"])


def sums(model):
    return Sums(model.parameters(), lr=0.01, initial_accumulator_value=0.5)


def cleared(step, optimizer):
    if step == 1:
        optimizer.state.clear()


# made after the state, and sets the rate of the first step
WARMUP: dict[str, Any] = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 5e-2, "warmup_num_steps": 4},
}
FROM_0 = WARMUP | {"params": {**WARMUP["params"], "warmup_min_lr": 0.0}}


def averaged(model):
    return torch.optim.ASGD(model.parameters(), 1e-1, t0=2)


KINDS: dict[str, dict[str, Any]] = {
    "step sizes that begin with a schedule": {"make": rprop, "scheduler": WARMUP},
    "rates that begin with a schedule": {"make": averaged, "scheduler": WARMUP},
    "rates that begin with 0": {"make": averaged, "scheduler": FROM_0},
    "step sizes that begin with 0": {"make": rprop, "scheduler": FROM_0},
    "groups of one flat with their own first state": {"make": rprop},
    "groups of one flat with their own sums": {"make": adagrad, "ranks": 2},
    "momentum of torch": {"make": momentum(torch.optim.SGD), "told": switched_on},
    "momentum of ours": {"make": momentum(CPUSGD), "told": switched_on},
    "one of one's own": {"make": own, "elementwise_optimizers": ["Own"], "ranks": 2},
    "one of one's own whose constructor makes state": {
        "make": sums,
        "told": cleared,
        "elementwise_optimizers": ["Sums"],
    },
}


@in_turn("kind, core", [*((kind, "native") for kind in KINDS), ("momentum of ours", "torch")])
def test_it_trains_as_on_the_device(kind, core, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ZERO_NATIVE", "1" if core == "native" else "0")
    native._loaded.cache_clear()
    try:
        want, *others = (
            trained(offload(each, 2, tmp_path), **KINDS[kind]) for each in (DEVICE, *PLACES)
        )
        for got in others:
            same(got, want)
    finally:
        native._loaded.cache_clear()


@in_turn(
    "update, way",
    [*((each, PLACES[0]) for each in BEGINS), *((each, PLACES[1]) for each in BEGINS[:2])],
)
def test_a_class_of_ones_own_begins_its_state(update, way, tmp_path):
    """As in plain torch, also after a load of a state dict, and after a reset."""

    def make(model):
        return Begun(model.parameters(), update)

    def change():
        taken = {}

        def told(step, optimizer):
            if step in (0, 1):
                taken[id(optimizer)] = copy.deepcopy(optimizer.state_dict())
            if step in (1, 2):
                optimizer.load_state_dict(copy.deepcopy(taken[id(optimizer)]))
            if step == 4:
                optimizer.state.clear()

        return told

    told, windows = change(), [[(1.0, 0)]] * 6
    want = by_hand(make, windows, 2, after_step=lambda step, _, optimizer: told(step, optimizer))[0]
    section = offload(way, 2, tmp_path)
    keys = {"elementwise_optimizers": ["Begun"]}
    same(trained(section, make, change(), ranks=2, steps=6, **keys), want)


@in_turn("way", [DEVICE, *PLACES])
def test_factors_that_a_script_has_removed_begin_anew(way, tmp_path):
    """Also of flat buffers whose parameters have no other state."""

    def make(model):
        return transformers.Adafactor(model.parameters())

    def matrices():
        return seeded(
            lambda: nn.Sequential(
                nn.Linear(7, 16, bias=False), nn.Tanh(), nn.Linear(16, 2, bias=False)
            )
        )

    def removed(step, optimizer):
        if step == 1:
            for member in (p for group in optimizer.param_groups for p in group["params"]):
                optimizer.state[member] = {}

    want, _ = by_hand(
        make,
        [[(1.0, 0)]] * 4,
        2,
        after_step=lambda step, _, optimizer: removed(step, optimizer),
        build=matrices,
    )
    same(trained(offload(way, 2, tmp_path), make, removed, matrices, ranks=2), want)


@in_turn("way", [DEVICE, *PLACES])
def test_a_class_of_ones_own_begins_its_state_in_bf16(way, tmp_path):
    def run(rank, model):
        precision = {"enabled": True, "bf16_optimizer_states": True}
        engine = opened(
            model,
            offload(way, 1, tmp_path),
            lambda model: Begun(model.parameters(), from_ones),
            bf16=precision,
            elementwise_optimizers=["Begun"],
        )
        train(engine, rank, range(1))
        return ended(engine)

    want = {name: p.detach() - 0.1 for name, p in stack().named_parameters()}
    same(on_ranks(2, run)[0], want)


@in_turn(
    "moves", [((DEVICE, PLACES[0]), (PLACES[0], DEVICE))], [((DEVICE, DEVICE), (PLACES[0],) * 2)]
)
def test_a_checkpoint_of_a_class_of_ones_own_resumes_offloaded_and_on_the_device(moves, tmp_path):
    """Also one from before the first step."""

    def run(rank, model, update, first):
        make = partial(Begun, update=update)
        keys = {"elementwise_optimizers": ["Begun"]}
        for way, _ in moves:
            engine = opened(
                stack(), offload(way, 1, tmp_path), lambda m: make(m.parameters()), **keys
            )
            train(engine, rank, range(first))
            engine.save_checkpoint(str(tmp_path / way))
            engine.destroy()
        found = []
        for way, other in moves:
            section = offload(other, 3, tmp_path)
            engine = opened(stack(), section, lambda m: make(m.parameters()), **keys)
            train(engine, rank, range(7, 8))
            engine.load_checkpoint(str(tmp_path / way))
            train(engine, rank, range(first, 4))
            found.append(ended(engine))
        return found

    for update in BEGINS:
        make = partial(Begun, update=update)
        want = by_hand(lambda model, make=make: make(model.parameters()), [[(1.0, 0)]] * 4, 2)[0]
        for first in (0, 2):
            for found in on_ranks(2, run, update, first):
                for got in found:
                    same(got, want)


def test_parameters_of_64_bits(tmp_path):
    want, got = (
        trained(offload(each, 3, tmp_path), adamw, build=lambda: stack().double(), ranks=2)
        for each in (DEVICE, "all in files")
    )
    assert {weights.dtype for weights in want.values()} == {torch.float64}
    same(got, want, exact=True)


class Constant(nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4096))

    def forward(self, gradient):
        return (self.weight * gradient).sum()


@in_turn("make", [Lion, CPUAdam])
def test_rounding_of_16_bit_moments_does_not_add_up(make, tmp_path):
    """The mean over many elements follows the exact moment."""

    def run(rank, model, moments):
        section = offload("optimizer on cpu", 2, tmp_path, moments=moments)
        engine = opened(model, section, lambda model: make(model.parameters(), lr=1e-4))
        for step in range(120):
            engine.backward(engine(1.0 if step < 60 else 0.9))
            engine.step()
        moment = hf_zero.safe_get_full_optimizer_state(model.weight, "exp_avg").float().clone()
        engine.destroy()
        return moment

    exact = on_ranks(1, run, "fp32", build=Constant)[0].mean()
    got = on_ranks(1, run, "bf16", build=Constant)[0]
    assert got.std() > 0 and abs(got.mean() - exact) < 1e-3 * exact  # one rounding is up to 4e-3


def test_moments_of_eight_bits_that_the_optimizer_asks_for(tmp_path):
    def make(**more):
        return lambda model: CPUAdam(model.parameters(), lr=1e-3, eps=1e-6, **more)

    section = offload("optimizer on cpu", 2, tmp_path)
    asked = trained(section, make(moments="int8"), ranks=2)
    section["offload_optimizer"]["moments"] = "int8"
    same(asked, trained(section, make(), ranks=2), exact=True)


def test_the_share_of_cores_is_of_those_of_the_rank_and_for_as_long_as_the_engine(
    tmp_path, monkeypatch
):
    count = [8]
    monkeypatch.setattr(native, "available", lambda: True)
    monkeypatch.setattr(native, "threads", lambda: count[0])
    monkeypatch.setattr(native, "set_threads", lambda wanted: count.__setitem__(0, wanted))
    monkeypatch.setattr(native, "default_share", lambda: Share(8, "this test"))

    def run(rank, model, cores, threads):
        section = offload("optimizer on cpu", 2, tmp_path, cpuadam_cores_perc=cores)
        first, second = opened(model, section), opened(stack(), section)
        assert count == [threads]
        second.destroy()
        first.destroy()
        assert count == [8]

    for cores, threads in ((0.5, 4), (0.01, 1), (1.0, 8)):
        on_ranks(1, run, cores, threads)


@pytest.mark.parametrize("make", [dampened, rprop, averaged])
def test_a_checkpoint_from_before_the_first_step_has_no_state(make, tmp_path):
    """With a momentum of zeros the first gradient would be damped, and with step sizes of zero no
    weight would move.
    """

    def run(rank, model):
        files = offload("all in files", 3, tmp_path)
        first = opened(model, files if make is dampened else {"stage": 3}, make)
        first.save_checkpoint(str(tmp_path / "saved"))
        first.destroy()
        engine = opened(stack(), files, make)
        train(engine, rank, range(5, 6))
        engine.load_checkpoint(str(tmp_path / "saved"))
        train(engine, rank, range(2))
        return ended(engine)

    same(on_ranks(2, run)[0], trained({"stage": 3}, make, ranks=2, steps=2))


def test_moments_in_int8_blocks_need_offload():
    """Refused before the model is changed; bf16 moments train without."""

    def run(rank, model):
        optimizer = CPUAdam(model.parameters(), moments="int8")
        with pytest.raises(UnsupportedOptimizerError, match=r"CPUAdam .*in 'fp32' or 'bf16'"):
            start(model, optimizer, config_of(1))
        engine = start(model, CPUAdam(model.parameters(), moments="bf16"), config_of(1))
        run_steps(engine, rank, range(2))
        engine.destroy()

    on_ranks(1, run)
