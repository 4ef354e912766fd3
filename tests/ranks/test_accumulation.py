"""Division of the loss and the end of a window: engine.backward and loss.backward, no_sync, the
boundary set from outside; the loss scale of fp16, and steps that are skipped.
"""

import copy
from contextlib import nullcontext

import pytest
import torch

from hf_zero.errors import PartitionError, UnmanagedWindowError
from hf_zero.zero.rebuild import rebuild
from hf_zero.zero.reduce import reductions
from hf_zero.zero.reduce.reductions import collect_gradients
from tests.helpers import oracle
from tests.helpers.cells import in_one_item, in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import ROWS, features
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, run_steps, squared
from tests.helpers.training import At, Plan, adamw, plain_sgd

RANKS = 2


def compare(windows, loop, stage, accumulation, **more):
    """The weights and norms of ``windows``; ``loop(engine, rank, step, window)`` runs one."""
    want, norms = by_hand(plain_sgd, windows, RANKS)

    def run(rank, model):
        config = config_of(stage, Plan(accumulation=accumulation), **more)
        engine, found = start(model, plain_sgd(model), config), []
        for step, window in enumerate(windows):
            loop(engine, rank, step, window)
            found.append(engine.get_global_grad_norm())
        return full_weights(engine), found

    for weights, found in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want)
        assert found == pytest.approx(norms, rel=1e-5)


def without_sync(engine, rank, step, window):
    """Around all but the last micro-batch."""
    for _, micro in window:
        with engine.no_sync() if micro < 2 else nullcontext():
            engine.backward(squared(engine, At(step, micro, rank)))
        engine.step()


def to_a_boundary(engine, rank, step, window):
    """Accelerate says where a window ends, and may call step() there only."""
    assert not engine.window_is_open
    for weight, micro in window:
        last = micro == len(window) - 1
        engine.set_gradient_accumulation_boundary(last)
        assert engine.is_gradient_accumulation_boundary() is last
        engine.backward(squared(engine, At(step, micro, rank)) * weight, scale_wrt_gas=False)
        assert engine.window_is_open
        if last or engine.stage == 3:
            engine.step()
        assert engine.window_is_open is not last
    assert engine.counters.global_steps == step + 1


def with_zero_grad(engine, rank, step, window):
    """The optimizer's, after each micro-batch, leaves the window; the engine's drops one."""
    if step == 1:
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(squared(engine, At(9, 9, rank)))
        with pytest.raises(PartitionError, match="inside an accumulation window"):
            engine.set_train_batch_size(2 * RANKS * ROWS)
        engine.zero_grad()
        assert not engine.window_is_open
        engine.set_train_batch_size(2 * RANKS * ROWS)
    for _, micro in window:
        if step == 1:
            engine.set_gradient_accumulation_boundary(micro == 1)
        engine.backward(squared(engine, At(step, micro, rank)))
        engine.step()
        engine.optimizer.zero_grad()


@in_turn(
    "loop, sizes, stage",
    [
        (without_sync, (3, 3), 3),
        (to_a_boundary, (3, 3, 2), 1),
        (to_a_boundary, (3, 3, 2), 3),
        (with_zero_grad, (2, 2), 1),
        (with_zero_grad, (2, 2), 3),
    ],
)
def test_where_windows_end(loop, sizes, stage):
    compare([[(1 / n, micro) for micro in range(n)] for n in sizes], loop, stage, sizes[0])


BREAKS = {  # what a script calls after the first micro-batch of a window, or in its second
    "engine": lambda engine: engine.zero_grad(),
    "restart": lambda engine: engine.restart_window(),
    "optimizer": lambda engine: engine.optimizer.zero_grad(),
    "model": lambda engine: engine.module.zero_grad(),
}


@in_turn(
    "how, where, stage",
    [
        ("engine", "between", 0),
        ("restart", "between", 1),
        ("optimizer", "between", 3),
        ("model", "backward", 2),
        ("optimizer", "backward", 1),
    ],
    long=[(how, at, s) for how in BREAKS for at in ("between", "backward") for s in range(4)],
)
def test_a_window_that_is_broken_off_begins_anew(how, where, stage, heard):
    heard.clear()

    def loop(engine, rank, step, window):
        if step == 1:
            engine.backward(squared(engine, At(7, 0, rank)))
            engine.step()
            if where == "backward":
                engine.backward(squared(engine, At(7, 1, rank)))
            BREAKS[how](engine)
        for _, micro in window:
            engine.backward(squared(engine, At(step, micro, rank)))
            engine.step()
        assert engine.global_steps == step + 1
        engine.optimizer.zero_grad()  # at the ends of windows

    compare([[(1 / 2, micro) for micro in range(2)]] * 3, loop, stage, 2)
    assert not heard


def test_a_zero_grad_inside_the_first_window_is_told(heard):
    def loop(engine, rank, step, window):
        for _, micro in window:
            engine.backward(squared(engine, At(step, micro, rank)))
            engine.step()
            engine.optimizer.zero_grad()

    compare([[(1 / 3, micro) for micro in range(3)]] * 2, loop, 2, 3)
    told = [line for line in heard if "optimizer.zero_grad() after micro-batch 1 of 3" in line]
    assert len(told) == 1 and "engine.restart_window()" in told[0]


@on_each_rank(RANKS)
def test_a_script_that_restarts_every_window_is_told(rank, model, heard):
    heard.clear()
    engine = start(model, plain_sgd(model), config_of(2, Plan(accumulation=2)))
    for step in range(6):
        engine.backward(squared(engine, At(step, 0, rank)))
        engine.step()
        engine.zero_grad()
    assert engine.global_steps == 0
    told = [line for line in heard if "has restarted 3 accumulation windows in a row" in line]
    assert rank or len(told) == 1


SECOND_STEPS = {
    "the optimizer's": lambda engine, _: engine.optimizer.step(),
    "the engine's": lambda engine, _: engine.step(),
    "after zero_grad": lambda engine, _: (engine.optimizer.zero_grad(), engine.step()),
}


@in_turn(
    "kind, stage, size",
    [("the optimizer's", 1, 2), ("the engine's", 3, 2), ("the optimizer's", 2, 1)],
    long=[(k, s, n) for k in SECOND_STEPS for s in range(4) for n in (1, 2, 3)],
)
def test_a_second_step_counts_nothing(kind, stage, size, heard):
    heard.clear()

    def loop(engine, rank, step, window):
        for micro in range(size):
            engine.backward(squared(engine, At(step, micro, rank)))
            for call in (lambda *_: engine.step(), SECOND_STEPS[kind]):
                call(engine, rank)
                assert engine.global_steps == step + (micro == size - 1)
                assert engine.micro_steps == step * size + micro + 1
                assert engine.was_step_applied() == (micro == size - 1)

    compare([[(1 / size, micro) for micro in range(size)]] * 3, loop, stage, size)
    told = [line for line in heard if "step() without a backward" in line]
    assert len(told) == 1 and "engine.backward(0.0 * outputs.sum())" in told[0]


@in_turn(
    "stage, counts, rebuilt",
    [(0, True, True), (1, True, False), (2, False, True), (3, False, False)],
)
def test_a_micro_batch_without_a_loss(stage, counts, rebuilt):
    """It may have one on another rank where backwards inside a window send nothing; elsewhere no
    rank can have had one, and it counts nothing. ``rebuilt``: after a change of what trains, by as
    many forwards as there were before.
    """

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage, Plan(accumulation=2)))
        run_steps(engine, rank, [0], 2)
        if rebuilt:
            rebuild(engine, "a change", lambda: None)
            squared(engine, At(1, 1, rank))
        loss = squared(engine, At(1, 0, rank))
        if counts and rank == 0:
            engine.backward(loss)
        engine.step()
        run_steps(engine, rank, [2], 1 if counts else 2)
        assert (engine.global_steps, engine.micro_steps) == (2, 4)

    on_ranks(RANKS, run)


@in_turn("stage", [0, 1])
def test_returned_gradients_after_a_micro_batch_without_a_loss(stage):
    """``torch.autograd.grad`` leaves the gradients that another rank alone has."""

    def run(rank, model):
        def weights(returns):
            copied = copy.deepcopy(model)
            engine = start(copied, plain_sgd(copied), config_of(stage, Plan(accumulation=2)))
            loss = squared(engine, At(0, 0, rank))
            if rank == 0:
                engine.backward(loss)
            engine.step()
            loss = squared(engine, At(0, 1, rank))
            if returns:
                torch.autograd.grad(loss, next(copied.parameters()), retain_graph=True)
            engine.backward(loss)
            engine.step()
            assert engine.global_steps == 1
            return full_weights(engine)

        oracle.compare_tensors("weights", weights(True), weights(False))

    on_ranks(RANKS, run)


@in_turn("stage", [0, 1])
def test_a_step_that_was_refused_counts_when_it_is_repeated(stage):
    """Also on a rank whose batch has no loss."""

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage, Plan(accumulation=2)))
        run_steps(engine, rank, [0])
        with engine.no_sync():
            loss = squared(engine, At(0, 1, rank))
            if rank == 0:
                engine.backward(loss)
        group = engine.optimizer.param_groups[0]
        params, group["params"] = group["params"], list(group["params"])
        with pytest.raises(PartitionError, match="groups"):
            engine.step()
        group["params"] = params
        engine.step()
        assert (engine.global_steps, engine.micro_steps) == (1, 2)

    on_ranks(RANKS, run)


@in_turn("stage, offload", [(1, True), (3, False)])
def test_windows_that_steps_end(stage, offload, heard):
    """``managed_gradient_accumulation: false``: a step uses what came since the last."""
    zero = {"stage": stage} | ({"offload_optimizer": {"device": "cpu"}} if offload else {})
    samples = [2, 14, 15]

    def loop(engine, rank, step, window):
        for _, micro in window:
            engine.backward(squared(engine, At(step, micro, rank)))
            assert engine.window_is_open and not engine.is_gradient_accumulation_boundary()
        engine.step()
        assert engine.was_step_applied() and not engine.window_is_open
        assert engine.global_samples // (RANKS * ROWS) == engine.micro_steps == samples[step]
        for drop in (engine.zero_grad, engine.optimizer.zero_grad):
            engine.backward(squared(engine, At(9, 9, rank)))
            drop()
            assert engine.micro_steps == samples[step] and not engine.window_is_open
        with pytest.raises(UnmanagedWindowError, match="every step"):
            engine.set_gradient_accumulation_boundary(True)

    more = {"zero_optimization": zero, "managed_gradient_accumulation": False}
    compare([[(1 / 4, m) for m in range(n)] for n in (2, 12, 1)], loop, stage, 4, **more)
    assert not any("without engine.step()" in line for line in heard)


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
        ("googggg", [16, 8, 4, 4, 4, 4, 8], {"loss_scale_window": 3}),  # begins anew
        # hysteresis forgives the first overflows, and is restored by a full window
        ("oogggo", [16, 8, 8, 8, 16, 16], {"hysteresis": 2, "loss_scale_window": 2}),
        ("gogo", [64] * 4, {"loss_scale": 64.0}),  # static
    ]
)
def test_the_scale_rises_and_falls(case):
    pattern, wanted, options = case
    assert scales(pattern, **options) == wanted


# the update that may begin in the backward waits for the norm
EARLY = {"stage": 2, "offload_optimizer": {"device": "cpu", "update_in_backward": True}}


@in_turn(
    "stage, keys",
    [(1, {"fp16": fp16()}), (3, CHECKED), (2, {**CHECKED, "zero_optimization": EARLY})],
)
def test_a_skipped_step_leaves_weights_and_scheduler(stage, keys, heard):
    """The state of the optimizer is a column of ``test_capabilities.py``."""
    del heard[:]

    def run(rank, model):
        optimizer = adamw(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        engine = start(model, optimizer, config_of(stage, **keys), lr_scheduler=scheduler)

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
    assert bool(said) == ("bf16" in keys)


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


@in_turn("stage, precision", [(0, "fp32"), (1, "bf16")])
def test_a_micro_batch_before_the_last_is_taken_in_once(stage, precision, monkeypatch):
    """When a unit is complete, not again at the end of its backward."""
    taken = []

    def collect(flat, target, accumulate, factor):
        used = collect_gradients(flat, target, accumulate, factor)
        taken.append(bool(used))
        return used

    monkeypatch.setattr(reductions, "collect_gradients", collect)

    def run(rank, model):
        plan = Plan(accumulation=3, precision=precision)
        engine = start(model, adamw(model), config_of(stage, plan))
        for micro in range(3):
            engine.backward(squared(engine, At(0, micro, rank), plan.dtype))
            engine.step()
        assert engine.was_step_applied()
        return len(engine.flats)

    assert sum(3 * flats for flats in on_ranks(RANKS, run)) == len(taken) and all(taken)
