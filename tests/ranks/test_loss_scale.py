"""fp16: the loss scale's rise and fall, and a skipped step that leaves everything as it was."""

import copy

import pytest
import torch

from hf_zero.errors import PartitionError
from tests.helpers.engines import STAGES, config_of, full_weights, start
from tests.helpers.models import features
from tests.helpers.stacks import on_each_rank, on_ranks, squared
from tests.helpers.training import At, Plan, adamw, plain_sgd

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


def test_an_overflow_halves_down_to_the_minimum():
    assert scales("oooo", min_loss_scale=4) == [8, 4, 4, 4]


def test_a_window_of_good_steps_doubles():
    assert scales("gggggg", loss_scale_window=2) == [16, 16, 32, 32, 64, 64]


def test_the_window_starts_anew_after_an_overflow():
    assert scales("googggg", loss_scale_window=3) == [16, 8, 4, 4, 4, 4, 8]


def test_hysteresis_forgives_the_first_overflows():
    assert scales("oogoo", hysteresis=2) == [16, 8, 8, 4, 2]
    assert scales("oooo", hysteresis=3) == [16, 16, 8, 4]


def test_hysteresis_is_restored_by_a_full_window():
    assert scales("oogggo", hysteresis=2, loss_scale_window=2) == [16, 8, 8, 8, 16, 16]


def test_consecutive_hysteresis_is_restored_by_any_good_step():
    assert scales("ogogoo", hysteresis=2, consecutive_hysteresis=True) == [16, 16, 16, 16, 16, 8]
    assert scales("ogogoo", hysteresis=2, consecutive_hysteresis=False) == [16, 16, 8, 8, 4, 2]


def test_a_static_scale_stays():
    assert scales("gogo", loss_scale=64.0) == [64] * 4


@pytest.mark.turns
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("overflowing_rank", [0, 1])
@pytest.mark.parametrize("precision", [{"fp16": fp16()}, CHECKED], ids=["fp16", "bf16"])
def test_a_skipped_step_leaves_weights_optimizer_and_scheduler(
    stage, overflowing_rank, precision, heard
):
    def run(rank, model):
        optimizer = adamw(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        engine = start(
            model,
            optimizer,
            config_of(stage, gradient_clipping=0.1, **precision),
            lr_scheduler=scheduler,
        )

        def everything():
            shards = [
                {name: t.clone() for name, t in engine.bound.tensors(flat.optimizer_shard).items()}
                for flat in engine.flats
                if flat.trainable
            ]
            return (
                full_weights(engine),
                shards,
                engine.bound.scalars(),
                copy.deepcopy(scheduler.state_dict()),
                engine.get_lr(),
            )

        one_step(engine, rank, 0, overflow=False)
        before = everything()
        assert engine.was_step_applied()
        one_step(engine, rank, 1, overflow=True, overflowing_rank=overflowing_rank)
        after = everything()
        assert not engine.was_step_applied()
        assert engine.optimizer.overflow is True and engine.skipped_steps == 1
        for name, weight in before[0].items():
            assert torch.equal(weight, after[0][name]), name
        for old, new in zip(before[1], after[1]):
            assert set(old) == set(new) and "exp_avg" in old
            assert all(torch.equal(old[name], new[name]) for name in old)
        assert before[2:] == after[2:]
        assert all(flat.shard.isfinite().all() for flat in engine.flats)
        one_step(engine, rank, 2, overflow=False)
        last = everything()
        assert last[4] != after[4]
        assert any(not torch.equal(weight, last[0][name]) for name, weight in after[0].items())

    on_ranks(RANKS, run)
    said = [line for line in heard if "step 2 skipped: its gradients are not finite" in line]
    assert bool(said) == ("bf16" in precision)


@pytest.mark.parametrize("update_in_backward", [False, True])
@on_each_rank(RANKS)
def test_a_skipped_step_in_bf16_with_the_optimizer_offloaded(rank, model, update_in_backward):
    """The update that may begin in the backward waits for the norm here."""
    offload = {"device": "cpu", "update_in_backward": update_in_backward}
    zero = {"stage": 2, "offload_optimizer": offload}
    config = config_of(2, zero_optimization=zero, **CHECKED)
    engine = start(model, adamw(model), config)
    one_step(engine, rank, 0, overflow=False)
    before = full_weights(engine)
    one_step(engine, rank, 1, overflow=True)
    assert not engine.was_step_applied()
    assert all(torch.equal(before[name], value) for name, value in full_weights(engine).items())


@pytest.mark.parametrize("stage", STAGES)
@on_each_rank(RANKS)
def test_an_overflow_in_one_micro_batch_spoils_its_window_alone(rank, model, stage):
    engine = start(model, adamw(model), config_of(stage, Plan(accumulation=2), fp16=fp16()))
    first = full_weights(engine)
    for micro in range(2):
        loss = squared(engine, At(0, micro, rank), HALF)
        engine.backward(loss * float("inf") if micro == 0 and rank == 0 else loss)
        engine.step()
    assert engine.optimizer.overflow is True
    assert all(torch.equal(weight, first[name]) for name, weight in full_weights(engine).items())
    for micro in range(2):
        engine.backward(squared(engine, At(1, micro, rank), HALF))
        engine.step()
    assert engine.optimizer.overflow is False
    assert all(weight.isfinite().all() for weight in full_weights(engine).values())
    assert 0 < engine.get_global_grad_norm() < 100


@pytest.mark.parametrize("stage", STAGES)
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
