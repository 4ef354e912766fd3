"""The state and settings that an optimizer may have between steps, on the device and offloaded."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.ops import native
from hf_zero.ops.share import Share
from hf_zero.optim import CPUSGD, CPUAdam, CPULion, Lion
from tests.helpers.cells import fast
from tests.helpers.offloads import (
    DEVICE,
    PLACES,
    Make,
    ended,
    offload,
    opened,
    same,
    train,
    trained,
)
from tests.helpers.stacks import on_each_rank, on_ranks, stack
from tests.helpers.training import adamw


def halves(model: nn.Module, one: dict[str, Any], other: dict[str, Any]) -> list[dict[str, Any]]:
    """Two groups, weights and biases, so that each flat has both."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], **one},
        {"params": [p for p in parameters if p.ndim <= 1], **other},
    ]


def rprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Rprop(halves(model, {"lr": 1e-2}, {"lr": 1e-4}))


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(
        halves(model, {"initial_accumulator_value": 0.5}, {"initial_accumulator_value": 0.0}),
        lr=1e-2,
    )


def momentum(kind: type[torch.optim.Optimizer]) -> Make:
    return lambda model: kind(halves(model, {"lr": 0.1}, {"lr": 0.02}), dampening=0.5)


def switched_on(step: int, optimizer: torch.optim.Optimizer) -> None:
    """After the first step."""
    optimizer.param_groups[0]["momentum"] = 0.9 if step else 0.0


class Own(torch.optim.Optimizer):
    """A momentum with bias correction; ``counter`` says where steps are counted: in the state,
    the group, a tensor of it, or on the object.
    """

    def __init__(self, params: Any, counter: str = "state"):
        super().__init__(
            params, {"lr": 1e-2, "steps": torch.zeros(()) if counter == "tensor" else 0}
        )
        self.counter, self.steps = counter, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += self.counter == "object"
        for group in self.param_groups:
            if self.counter in ("group", "tensor"):
                group["steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                kept = self.state[p]
                if not kept:
                    kept["step"], kept["momentum"] = torch.zeros(()), torch.zeros_like(p)
                kept["step"] += 1
                kept["momentum"].lerp_(p.grad, 0.1)
                count = {"state": kept["step"], "object": self.steps}.get(
                    self.counter, group["steps"]
                )
                p.sub_(kept["momentum"] * group["lr"] / (1 - 0.9 ** float(count)))


def own(model: nn.Module) -> torch.optim.Optimizer:
    return Own(halves(model, {}, {}))


KINDS: dict[str, dict[str, Any]] = {
    "groups of one flat with their own first state": {"make": rprop},
    "groups of one flat with their own sums": {"make": adagrad, "ranks": 2},
    "momentum of torch": {"make": momentum(torch.optim.SGD), "told": switched_on},
    "momentum of ours": {"make": momentum(CPUSGD), "told": switched_on},
    "one of one's own": {"make": own, "elementwise_optimizers": ["Own"], "ranks": 2},
}


@pytest.mark.parametrize(
    "kind, way, core",
    fast(
        itertools.product(KINDS, PLACES, ("native", "torch")),
        lambda kind, way, core: kind.startswith("momentum") or core == "native",
    ),
)
def test_it_trains_as_on_the_device(kind, way, core, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ZERO_NATIVE", "1" if core == "native" else "0")
    native._loaded.cache_clear()
    try:
        want, got = (trained(offload(each, 2, tmp_path), **KINDS[kind]) for each in (DEVICE, way))
        same(got, want)
    finally:
        native._loaded.cache_clear()


@pytest.mark.parametrize(
    "way, stage", [("optimizer on cpu", 1), ("optimizer in files", 2), ("all in files", 3)]
)
def test_parameters_of_64_bits(way, stage, tmp_path):
    want, got = (
        trained(offload(each, stage, tmp_path), adamw, build=lambda: stack().double(), ranks=2)
        for each in (DEVICE, way)
    )
    assert {weights.dtype for weights in want.values()} == {torch.float64}
    same(got, want, exact=True)


class Constant(nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4096))

    def forward(self, gradient: float) -> torch.Tensor:
        return (self.weight * gradient).sum()


@pytest.mark.parametrize("make", [Lion, CPULion, CPUAdam])
def test_rounding_of_16_bit_moments_does_not_add_up(make, tmp_path):
    """Each step rounds with numbers of its own: the mean over many elements follows the exact
    moment.
    """

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


def dampened(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(halves(model, {"lr": 0.05}, {"lr": 0.01}), momentum=0.9, dampening=0.3)


@pytest.mark.turns
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("make", [adamw, dampened])
@pytest.mark.parametrize("way", [*PLACES, "half on cpu"])
def test_the_state_dict_of_the_optimizer_holds_what_is_kept_and_can_be_loaded(
    way, make, steps, tmp_path
):
    def run(rank, model, way):
        engine = opened(model, offload(way, 2, tmp_path), make)
        train(engine, rank, range(steps))
        saved = copy.deepcopy(engine.optimizer.state_dict())
        train(engine, rank, range(7, 8))
        engine.optimizer.load_state_dict(copy.deepcopy(saved))
        train(engine, rank, range(8, 9))
        return saved, ended(engine)

    def numbers(saved, name):
        found = [entry[name].flatten() for entry in saved["state"].values() if name in entry]
        return torch.cat(found).sort().values if found else torch.zeros(0)

    (want, expected), (got, weights) = (on_ranks(1, run, each)[0] for each in (DEVICE, way))
    same(weights, expected)
    for name in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
        # padding apart
        one, other = (each[each != 0] for each in (numbers(want, name), numbers(got, name)))
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-8)
    assert steps == 0 or any(len(numbers(got, name)) for name in ("exp_avg", "momentum_buffer"))


def test_moments_of_eight_bits_that_the_optimizer_asks_for(tmp_path):
    def make(**more):
        return lambda model: CPUAdam(model.parameters(), lr=1e-3, eps=1e-6, **more)

    section = offload("optimizer on cpu", 2, tmp_path)
    asked = trained(section, make(moments="int8"), ranks=2)
    section["offload_optimizer"]["moments"] = "int8"
    same(asked, trained(section, make(), ranks=2), exact=True)


@pytest.mark.parametrize("counter", ["group", "tensor", "object"])
@on_each_rank(1)
def test_an_optimizer_that_counts_its_calls_is_not_stepped_in_pieces(
    rank, model, counter, tmp_path
):
    optimizer = Own(model.parameters(), counter)
    section = offload("optimizer on cpu", 2, tmp_path)
    with pytest.raises(
        UnsupportedOptimizerError, match=r"changes \['steps'\] of its groups or of itself"
    ):
        opened(model, section, lambda model: optimizer, elementwise_optimizers=["Own"])
    assert optimizer.steps == 0 and float(optimizer.param_groups[0]["steps"]) == 0
    keys = {"elementwise_optimizers": ["Own"]}
    opened(model, {"stage": 2}, lambda model: optimizer, **keys).destroy()


@pytest.mark.parametrize("cores, threads", [(0.5, 4), (0.01, 1), (1.0, 8)])
def test_the_share_of_cores_is_of_those_of_the_rank_and_for_as_long_as_the_engine(
    cores, threads, tmp_path, monkeypatch
):
    count = [8]
    monkeypatch.setattr(native, "available", lambda: True)
    monkeypatch.setattr(native, "threads", lambda: count[0])
    monkeypatch.setattr(native, "set_threads", lambda wanted: count.__setitem__(0, wanted))
    monkeypatch.setattr(native, "default_share", lambda: Share(8, "this test"))

    def run(rank, model):
        section = offload("optimizer on cpu", 2, tmp_path, cpuadam_cores_perc=cores)
        first, second = opened(model, section), opened(stack(), section)
        assert count == [threads]
        second.destroy()
        first.destroy()
        assert count == [8]

    on_ranks(1, run)


@pytest.mark.parametrize("way, stage", [("optimizer on cpu", 1), ("all in files", 3)])
def test_a_checkpoint_from_before_the_first_step_has_no_momentum(way, stage, tmp_path):
    """With one of zeros the first gradient would be damped."""
    (tmp_path / "disk").mkdir()

    def run(rank, model):
        engine = opened(model, offload(way, stage, tmp_path / "disk"), dampened)
        engine.save_checkpoint(str(tmp_path / "saved"))
        train(engine, rank, range(5, 6))
        engine.load_checkpoint(str(tmp_path / "saved"))
        train(engine, rank, range(2))
        return ended(engine)

    same(on_ranks(2, run)[0], trained({"stage": stage}, dampened, ranks=2, steps=2))
