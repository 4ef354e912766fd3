"""fp16: the loss scale's rise and fall, and a skipped step that leaves everything as it was."""

import copy

import pytest
import torch

from hf_zero.errors import PartitionError
from tests.helpers.cells import in_one_item, in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import features
from tests.helpers.stacks import on_each_rank, on_ranks, squared
from tests.helpers.training import At, adamw, plain_sgd

RANKS = 2
HALF = torch.float16


def fp16(**options):
    return {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 4,
        "loss_scale_window": 1000,
        "hysteresis": 1,
        "min_loss_scale": 1,
    } | options


CHECKED = {"bf16": {"enabled": True, "check_grad_overflow": True}}


def one_step(engine, rank, step, overflow, overflowing_rank=1):
    """One micro-batch; an overflow is forced on one rank alone."""
    dtype = HALF if engine.config.precision == "fp16" else torch.bfloat16
    loss = squared(engine, At(step, 0, rank), dtype)
    if overflow and rank == overflowing_rank:
        loss = loss * float("inf")
    engine.backward(loss)
    engine.step()


def scales(pattern, stage=2, **options):
    """The scale after each step of ``pattern``: g is a good step, o one that overflows."""

    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage, fp16=fp16(**options)))
        seen = []
        for step, kind in enumerate(pattern):
            one_step(engine, rank, step, kind == "o")
            assert engine.optimizer.overflow is (kind == "o"), f"step {step}"
            assert engine.optimizer.loss_scale == engine.optimizer.cur_scale
            seen.append(float(engine.optimizer.cur_scale))
        assert engine.counters.skipped_steps == pattern.count("o")
        return seen

    first, *others = on_ranks(RANKS, run)
    assert others == [first] * (RANKS - 1)
    return first


@in_one_item(
    [
        ("oooo", [8, 4, 4, 4], {"min_loss_scale": 4}),  # halves down to the minimum
        ("gggggg", [16, 16, 32, 32, 64, 64], {"loss_scale_window": 2}),
        ("googggg", [16, 8, 4, 4, 4, 4, 8], {"loss_scale_window": 3}),  # begins anew
        # hysteresis forgives the first overflows, and is restored by a full window
        ("oogoo", [16, 8, 8, 4, 2], {"hysteresis": 2}),
        ("oooo", [16, 16, 8, 4], {"hysteresis": 3}),
        ("oogggo", [16, 8, 8, 8, 16, 16], {"hysteresis": 2, "loss_scale_window": 2}),
        # or by any good step
        ("ogogoo", [16, 16, 16, 16, 16, 8], {"hysteresis": 2, "consecutive_hysteresis": True}),
        ("ogogoo", [16, 16, 8, 8, 4, 2], {"hysteresis": 2, "consecutive_hysteresis": False}),
        ("gogo", [64] * 4, {"loss_scale": 64.0}),  # static
    ]
)
def test_the_scale_rises_and_falls(case):
    pattern, wanted, options = case
    assert scales(pattern, **options) == wanted


@in_turn("stage, precision", [(1, {"fp16": fp16()}), (3, CHECKED)])
def test_a_skipped_step_leaves_the_scheduler(stage, precision, heard):
    """Weights and state of the optimizer are a column of ``test_capabilities.py``."""

    def run(rank, model):
        optimizer = adamw(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        engine = start(model, optimizer, config_of(stage, **precision), lr_scheduler=scheduler)

        def seen():
            weights = full_weights(engine)
            return weights, copy.deepcopy(scheduler.state_dict()), engine.get_lr()

        one_step(engine, rank, 0, overflow=False)
        before = seen()
        one_step(engine, rank, 1, overflow=True, overflowing_rank=0)
        after = seen()
        assert not engine.was_step_applied()
        assert engine.optimizer.overflow is True and engine.skipped_steps == 1
        assert all(torch.equal(value, after[0][name]) for name, value in before[0].items())
        assert before[1:] == after[1:]
        assert all(flat.shard.isfinite().all() for flat in engine.flats)
        one_step(engine, rank, 2, overflow=False)
        assert engine.get_lr() != after[2]

    on_ranks(RANKS, run)
    said = [line for line in heard if "step 2 skipped: its gradients are not finite" in line]
    assert bool(said) == ("bf16" in precision)


@on_each_rank(RANKS)
def test_a_skipped_step_in_bf16_with_the_optimizer_offloaded(rank, model):
    """The update that may begin in the backward waits for the norm here."""
    offload = {"device": "cpu", "update_in_backward": True}
    zero = {"stage": 2, "offload_optimizer": offload}
    config = config_of(2, zero_optimization=zero, **CHECKED)
    engine = start(model, adamw(model), config)
    one_step(engine, rank, 0, overflow=False)
    before = full_weights(engine)
    one_step(engine, rank, 1, overflow=True)
    assert not engine.was_step_applied()
    assert all(torch.equal(before[name], value) for name, value in full_weights(engine).items())


@in_turn("stage", [0, 3])
def test_a_scale_too_large_finds_its_level(stage):
    """From 2^32 the first steps overflow by themselves, in the model's own fp16 gradients."""

    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage, fp16=fp16(initial_scale_power=32)))
        losses = []
        for _ in range(26):
            loss = squared(engine, At(0, 0, rank), HALF)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
        assert 5 < engine.counters.skipped_steps < 26
        assert engine.optimizer.cur_scale == 2.0 ** (32 - engine.counters.skipped_steps)
        return losses

    for losses in on_ranks(RANKS, run):
        assert losses[-1] < losses[0]


@on_each_rank(1)
def test_an_fp16_loss_that_cannot_carry_its_scale(rank, model):
    engine = start(
        model, plain_sgd(model), config_of(2, fp16={"enabled": True, "loss_scale": 131072.0})
    )
    with pytest.raises(
        PartitionError,
        match="an fp16 loss cannot carry a loss_scale of 131072; compute the loss in fp32",
    ):
        engine.backward(engine(features(0, 0, rank).half()).pow(2).mean())
    engine.backward(engine(features(0, 0, rank).half()).float().pow(2).mean() * 1e-3)
