"""Several engines in one process: teacher and student, a generator and its critic, actor, critic
and reference.

Each has its own stage and precision. A loss goes over the outputs of several, and the output of one
is the input of another. The oracle is the same loop over plain models.
"""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_zero.errors import PartitionError
from hf_zero.ops import native
from hf_zero.zero.sharded_model import limit_native_threads
from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_grads, full_weights, start
from tests.helpers.models import Stack, floats, seeded
from tests.helpers.stacks import on_ranks
from tests.helpers.training import Plan, plain_sgd
from tests.ranks.cases import values_of

RANKS, STEPS = 2, 3


class Wide(Stack):
    """[rows, 7] -> [rows, 7], so that one can feed another."""

    def __init__(self):
        super().__init__(depth=2)
        self.head = nn.Linear(self.enter.out_features, 7)


def wides(count):
    models = [seeded(Wide) for _ in range(count)]
    for number, model in enumerate(models):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.0 + 0.1 * number)
    return models


def data(step, micro=0, rank=None):
    """The rows of a rank, or of all ranks."""
    ranks = range(RANKS) if rank is None else [rank]
    return torch.cat([floats(step, micro, each, 3, 7) for each in ranks])


def fed(nets, x):
    """The second is fed by the first."""
    first = nets[0](x)
    return nets[1](first).float().pow(2).mean() + first.float().mean()


def beside(nets, x):
    return (nets[0](x).float() - nets[1](x).float()).pow(2).mean()


def back_and_forth(nets, x):
    """The first twice, the second in between."""
    return nets[0](nets[1](nets[0](x))).float().pow(2).mean()


def in_a_ring(nets, x):
    one, two, three = nets
    apart = (one(two(x)).float() - three(two(x)).float()).pow(2).mean()
    return apart + two(three(x)).float().pow(2).mean()


def opened(models, configs):
    """Engines, and what calls each in the dtype of its parameters."""
    engines = [start(model, plain_sgd(model), config) for model, config in zip(models, configs)]
    return engines, [
        lambda x, e=engine: e(x.to(next(e.module.parameters()).dtype)) for engine in engines
    ]


def plainly(loss_of, count, accumulation=1):
    """(losses, norms of each model by step, weights of each) of plain models."""
    models, losses, norms = wides(count), [], []
    optimizers = [plain_sgd(model) for model in models]
    for step in range(STEPS):
        found = [loss_of(models, data(step, micro)) for micro in range(accumulation)]
        loss = torch.stack(found).mean()
        loss.backward()
        losses.append(loss.item())
        grads = [{n: p.grad for n, p in model.named_parameters()} for model in models]
        norms.append([oracle.total_norm(each) for each in grads])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms, [values_of(model) for model in models]


def first(engines, loss):
    engines[0].backward(loss)


def lastly(engines, loss):
    engines[-1].backward(loss)


def by_itself(engines, loss):
    loss.backward()


def divided_already(engines, loss):
    engines[0].backward(loss / 2, scale_wrt_gas=False)


def check(loss_of, configs, accumulation=1, backward=first, tolerance=1e-5, before=None):
    """Engines of ``configs``, whose loss is given away by ``backward``, as in a plain loop."""
    losses, norms, weights = plainly(loss_of, len(configs), accumulation)

    def run(rank, models):
        engines, nets = opened(models, configs)
        if before:
            before(engines, loss_of(nets, data(9, 0, rank)))
        found, measured = [], []
        for step in range(STEPS):
            total = 0.0
            for micro in range(accumulation):
                loss = loss_of(nets, data(step, micro, rank))
                backward(engines, loss)
                total += loss.item() / accumulation
                for engine in engines:
                    engine.step()
            found.append(total)
            measured.append([engine.get_global_grad_norm() for engine in engines])
        return found, measured, [full_weights(engine) for engine in engines]

    outcomes = on_ranks(RANKS, run, build=lambda: wides(len(configs)))
    means = [sum(each) / RANKS for each in zip(*(found for found, *_ in outcomes))]
    assert means == pytest.approx(losses, rel=tolerance)
    begun = [{name: p.detach() for name, p in m.named_parameters()} for m in wides(len(configs))]
    for _, measured, ended in outcomes:
        for got, expected in zip(measured, norms, strict=True):
            assert got == pytest.approx(expected, rel=tolerance)
        for number, (got, expected) in enumerate(zip(ended, weights, strict=True)):
            moves = [
                {name: value - begun[number][name] for name, value in each.items()}
                for each in (got, expected)
            ]
            oracle.compare_tensors(
                f"moves of model {number}", *moves, 5 * tolerance, max(1e-4, tolerance)
            )


def of_stages(*stages, accumulation=2):
    return [config_of(stage, Plan(accumulation=accumulation)) for stage in stages]


@in_turn(
    "loss, stages, backward",
    [
        (in_a_ring, (3, 2, 0), first),
        (beside, (2, 3), lastly),
        (fed, (0, 3), by_itself),
        (fed, (3, 1), divided_already),
    ],
)
def test_a_loss_over_several_engines(loss, stages, backward):
    check(loss, of_stages(*stages), 2, backward)


def scaled(precisions, stage=3):
    plans = [Plan(precision=each, scale=scale) for each, scale in zip(precisions, (256.0, 4096.0))]
    return [config_of(stage, plan) for plan in plans]


@in_turn(
    "one, other, loss, backward",
    [
        ("fp16", "fp16", fed, first),
        ("fp16", "fp32", beside, lastly),
        ("fp32", "fp16", back_and_forth, first),
        ("bf16", "fp16", fed, lastly),
    ],
)
def test_precisions_side_by_side(one, other, loss, backward):
    """A gradient contains a loss scale once, whichever engines it passes through."""
    check(loss, scaled((one, other)), backward=backward, tolerance=3e-2)


def refused(engines, loss):
    with pytest.raises(PartitionError, match="several fp16 forwards or engines"):
        loss.backward()
    for engine in engines:
        engine.zero_grad()


def test_a_plain_backward_through_two_engines_cannot_be_scaled():
    """What the refusal has left is forgotten."""
    check(beside, scaled(("fp32", "fp16")), tolerance=3e-2, before=refused)


def dynamic(power):
    return {"enabled": True, "initial_scale_power": power, "hysteresis": 1}


@in_turn("precision, given_to", [("bf16", 1), ("fp16", 0)])
def test_a_scale_that_is_too_large_falls_whoever_overflows(precision, given_to):
    """What the second engine sends back into the first overflows and spoils no weight."""
    own = {"fp16": dynamic(4)} if precision == "fp16" else {}
    configs = [config_of(2, Plan(precision=precision), **own), config_of(3, fp16=dynamic(20))]

    def run(rank, models):
        engines, nets = opened(models, configs)
        for step in range(18):
            loss = nets[1](nets[0](data(0, 0, rank))).float().pow(2).mean()
            engines[given_to].backward(loss)
            for engine in engines if step % 2 else reversed(engines):
                engine.step()
        for engine in engines:
            assert all(bool(value.isfinite().all()) for value in full_weights(engine).values())
        skipped = [engine.counters.skipped_steps for engine in engines]
        scales = [engine.scaler.scale for engine in engines]
        if precision == "fp16" and given_to == 0:
            assert skipped == [0, 0] and scales == [16.0, 2.0**20]
        else:
            assert min(skipped) > 0 and max(skipped) < 15
            assert scales[1] == 2.0 ** (20 - max(skipped))

    on_ranks(RANKS, run, build=lambda: wides(2))


def test_a_scale_that_fell_in_the_middle_of_a_window_counts_from_the_next():
    """The first engine overflows while the second still holds gradients."""
    model = wides(2)[1]
    model(data(0)).pow(2).mean().backward()
    want = {name: p.grad for name, p in model.named_parameters()}

    def run(rank, models):
        (one, two), _ = opened(models, [config_of(3), config_of(3, fp16=dynamic(10))])
        x = data(0, 0, rank)
        huge = one(x).sum() * 1e38
        two.backward(two(x.half()).float().pow(2).mean() + huge)
        one.step()
        assert one.counters.skipped_steps == 1 and two.scaler.scale == 2.0**10
        oracle.compare_tensors("gradients", full_grads(two), want, 3e-2, 3e-3)
        two.step()
        assert two.counters.skipped_steps == 0 and two.scaler.scale == 2.0**9
        two.backward(two(x.half()).float().pow(2).mean() + one(x).sum() * 1e38)
        two.zero_grad()
        assert two.scaler.scale == 2.0**9
        one.step()
        assert two.scaler.scale == 2.0**8, "it holds no gradients, so its scale falls at once"

    on_ranks(RANKS, run, build=lambda: wides(2))


def against_half(net, rank=None):
    x = data(0, 0, rank)
    return (net(x).float() - 0.5 * x).pow(2).mean()


@in_turn("stage", [1, 3])
def test_an_engine_that_one_rank_still_holds_lends_its_scale_there_alone(stage):
    """It was dropped without ``destroy``, and ranks collect garbage at different times."""
    left, plain = [seeded(Wide) for _ in range(RANKS)], seeded(Wide)
    against_half(plain).backward()
    want = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}

    def run(rank, model):
        other = start(left[rank], plain_sgd(left[rank]), config_of(stage, Plan(precision="fp16")))
        kept = other if rank == 0 else None
        left[rank] = nn.Identity()
        del other
        gc.collect()
        engine = start(model, plain_sgd(model), config_of(stage))
        engine.backward(against_half(engine, rank))
        grads = full_grads(engine)
        engine.destroy()
        if kept is not None:
            kept.destroy()
        return grads

    for grads in on_ranks(RANKS, run, build=lambda: seeded(Wide)):
        oracle.compare_tensors("gradient", {name: grads[name] for name in want}, want)


def test_an_engine_at_rest_lends_no_scale():
    """Infinite gradients of another are used, as in a plain loop, and no step skipped."""

    def run(rank, models):
        half = start(models[0], plain_sgd(models[0]), config_of(3, fp16={"enabled": True}))
        half.backward(half(data(0, 0, rank).half()).float().square().mean())
        half.step()
        before = half.loss_scale(), half.skipped_steps
        engine = start(models[1], plain_sgd(models[1]), config_of(3))
        engine.backward(engine(data(1, 0, rank)).square().mean() * float("inf"))
        engine.step()
        assert (half.loss_scale(), half.skipped_steps) == before and engine.skipped_steps == 0
        assert not all(bool(each.isfinite().all()) for each in full_weights(engine).values())

    on_ranks(RANKS, run, build=lambda: [seeded(Wide).half(), seeded(Wide)])


@pytest.mark.skipif(not native.available(), reason="no native core")
def test_an_engine_with_a_frozen_weight_stands_beside_a_second_one_in_fp16():
    """The first trains on, and trains the weight again once it is unfrozen, as in torch."""

    def run(rank, models):
        mine, other, plain = models
        optimizer, x = plain_sgd(plain), data(0, 0, 0)
        engine, half = start(mine, plain_sgd(mine), config_of(2)), None
        for trains in (True, False, True):
            for model in (mine, plain):
                model.head.weight.requires_grad_(trains)
            if not trains:
                half = start(other, plain_sgd(other), config_of(2, Plan(precision="fp16")))
            engine.backward(engine(x).pow(2).mean())
            engine.step()
            optimizer.zero_grad()
            plain(x).pow(2).mean().backward()
            optimizer.step()
        oracle.compare_tensors("weights", full_weights(engine), values_of(plain))
        half.destroy()

    on_ranks(RANKS, run, build=lambda: [seeded(Wide) for _ in range(3)])


def test_limits_on_native_threads_leave_none_behind(monkeypatch):
    before = native.threads()
    monkeypatch.setattr(native, "default_share", lambda: native.Share(4, "a test"))
    try:
        native.set_threads(3)
        for ends in ((0, 1), (1, 0)):
            placements = [SimpleNamespace(offloads_optimizer=True, cores=n) for n in (0.5, 0.25)]
            restores = [limit_native_threads(placement) for placement in placements]
            assert native.threads() == 1
            restores[ends[0]]()
            assert native.threads() == (1 if ends[0] == 0 else 2)
            restores[ends[1]]()
            assert native.threads() == 3
    finally:
        native.set_threads(before)
