"""State and settings that an optimizer may have between steps, on the device and offloaded; bytes
of each tier as estimated; groups of which a rank owns nothing.
"""

from __future__ import annotations

import copy
import gc
import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.ops import native
from hf_zero.ops.native import Share
from hf_zero.optim import CPUSGD, CPUAdam, CPULion, Lion
from hf_zero.optim.own_step import OwnStep
from hf_zero.planning.needs import needs
from hf_zero.zero.layout import materialize
from tests.helpers.cells import fast
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import ARCHITECTURES
from tests.helpers.offloads import (
    DEVICE,
    PLACES,
    WAYS,
    ended,
    offload,
    opened,
    same,
    stages_of,
    train,
    trained,
)
from tests.helpers.plans import planned
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import on_each_rank, on_ranks, run_steps, stack
from tests.helpers.training import Plan, adamw


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


def switched_on(step, optimizer):
    """After the first step."""
    optimizer.param_groups[0]["momentum"] = 0.9 if step else 0.0


class Own(torch.optim.Optimizer):
    """A momentum with bias correction; ``counter`` says where steps are counted: in the state,
    the group, a tensor of it, or on the object.
    """

    def __init__(self, params, counter="state"):
        super().__init__(
            params, {"lr": 1e-2, "steps": torch.zeros(()) if counter == "tensor" else 0}
        )
        self.counter, self.steps = counter, 0

    @torch.no_grad()
    def step(self, closure=None):
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


def own(model):
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

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4096))

    def forward(self, gradient):
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


def dampened(model):
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


LLAMA = ARCHITECTURES["llama"]
RANKS = 2
STATE = {
    "parameters",
    "gradients",
    "master weights and moments",
    "pieces between files and the update",
    "shards between files and the device",
}


def total(parts):
    return sum(part.nbytes for part in parts if part.what in STATE)


def held(rank, models, config):
    model = models[rank]
    engine = start(model, adamw(model), config)
    for step in range(2):
        engine.backward(engine(**LLAMA.batch(step, 0, rank)).loss)
        engine.step()
    if engine.updater.units:
        engine.updater.finish()
    found = engine.bytes_by_tier()
    assert sum(engine.state_bytes().values()) <= sum(found.values())
    engine.destroy()
    return found


CELLS = [
    (way, stage, precision, "fp32")
    for way in WAYS
    for stage in stages_of(way)
    for precision in ("fp32", "bf16")
]
CELLS += [("optimizer on cpu", 2, "bf16", moments) for moments in ("bf16", "int8")] + [
    ("all in files", 3, "bf16", "int8")
]


@pytest.mark.parametrize(
    "way, stage, precision, moments",
    fast(CELLS, lambda way, stage, precision, moments: precision == "bf16" or stage == 3),
)
def test_tiers_hold_what_was_estimated(way, stage, precision, moments, tmp_path):
    plan = Plan(ranks=RANKS, precision=precision, clip=1.0)
    config = config_of(
        stage, plan, zero_optimization=offload(way, stage, tmp_path, moments=moments)
    )
    models = [LLAMA.build() for _ in range(RANKS)]
    wanted = ZeroConfig.from_dict(config).resolve(RANKS)
    said = needs(planned(models[0], wanted, RANKS))
    found = run_ranks(RANKS, held, models, config)[0]
    for tier, estimated in (
        ("device", total(said.device)),
        ("ram", total(said.ram)),
        ("disk", total(said.disk)),
    ):
        assert found[tier] == pytest.approx(estimated, rel=0.1), tier


@on_each_rank(1)
def test_memory_goes_back_with_the_engine_though_the_optimizer_stays(rank, model, tmp_path):
    optimizer = adamw(model)
    engine = start(
        model, optimizer, config_of(2, zero_optimization=offload("optimizer on cpu", 2, tmp_path))
    )
    run_steps(engine, rank, [0])
    arenas = list(engine.sharded_model.placement._arenas.values())
    assert sum(arena.nbytes for arena in arenas) > 4 * 4 * sum(
        p.numel() for p in model.parameters()
    )
    engine.destroy()
    gc.collect()
    assert sum(arena.nbytes for arena in arenas) == 0
    given = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert given == [id(p) for p in model.parameters()]  # and none of its segments


@pytest.mark.parametrize("way", ["none", "optimizer on cpu", "all in files"])
def test_memory_of_the_model_goes_back_unit_by_unit_where_the_host_needs_it(
    way, tmp_path, monkeypatch
):
    called = []
    monkeypatch.setattr(materialize, "release_freed", lambda: called.append(1))

    def run(rank, model):
        engine = start(
            model,
            adamw(model),
            config_of(
                3, zero_optimization=offload(way, 3, tmp_path) if way != "none" else {"stage": 3}
            ),
        )
        assert len(called) == (0 if way == "none" else len(engine.units))
        engine.destroy()

    on_ranks(1, run)


OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-2),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
}


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


def train_groups(rank, models, make, section):
    model = models[rank]
    biases = [model.layers[-1].bias]  # at the end of the last flat, which rank 1 owns
    groups = [{"params": [p for p in model.parameters() if p is not biases[0]]}, {"params": biases}]
    engine = start(
        model, make(groups), config_of(2, Plan(ranks=2, clip=0.1), zero_optimization=section)
    )
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        engine.backward(engine(torch.randn(4, 16, generator=generator)))
        engine.step()
    weights, counted = full_weights(engine), engine.bound.scalars()
    state = [value for entry in engine.optimizer.state.values() for value in entry.values()]
    finite = all(
        math.isfinite(float(value.float().sum()))
        for value in state
        if isinstance(value, torch.Tensor)
    )
    stand_ins = len(engine.bound._table.stand_ins)
    engine.destroy()
    return weights, counted, finite, stand_ins


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stand_in_is_stepped_apart_and_counts_as_the_others_do(name, monkeypatch):
    calls = []
    over = OwnStep._over

    def recorded(self, segments, gradients, grad_scale, *more):
        calls.append(
            (
                all(segment.parts for segment in segments),
                any(segment.parts for segment in segments),
                grad_scale,
            )
        )
        over(self, segments, gradients, grad_scale, *more)

    def run(section):
        torch.manual_seed(0)
        first = Blocks()
        models = [Blocks() for _ in range(2)]
        for model in models:
            model.load_state_dict(first.state_dict())
        return run_ranks(2, train_groups, models, OPTIMIZERS[name], section)

    plain = run({"stage": 2})
    monkeypatch.setattr(OwnStep, "_over", recorded)
    offloaded = run({"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}})
    assert [stand_ins for *_, stand_ins in offloaded] == [1, 0]
    assert any(not owned for owned, *_ in calls), "no stand-in was stepped: the case is another one"
    for owned, some, scale in calls:
        assert owned or not (some or scale is not None), (
            "a stand-in was stepped with what is on the device, or scaled by it"
        )
    for (weights, counted, finite, _), (expected, expected_counts, _, _) in zip(offloaded, plain):
        assert finite and counted == expected_counts
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-6)
