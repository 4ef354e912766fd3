"""Division of the loss and the end of a window: engine.backward and loss.backward, no_sync, the
boundary set from outside.
"""

from contextlib import nullcontext

import pytest
import torch

from hf_zero.errors import PartitionError, UnmanagedWindowError
from tests.helpers import oracle
from tests.helpers.engines import STAGES, OnEngine, config_of, full_weights, start, train_on_threads
from tests.helpers.models import ROWS
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, squared
from tests.helpers.training import At, Plan, StackJob, plain_sgd

RANKS = 2


class PlainBackward(OnEngine):
    def backward(self, loss):
        loss.backward()


class DividedByTheUser(OnEngine):
    """A driver that divides the loss itself and tells the engine so, like the Trainer."""

    def __init__(self, engine, plan):
        super().__init__(engine, plan)
        self.accumulation = plan.accumulation

    def backward(self, loss):
        self.engine.backward(loss / self.accumulation, scale_wrt_gas=False)


def opened_by(session, stage):
    return lambda model, optimizer, plan: session(
        start(model, optimizer, config_of(stage, plan)), plan
    )


@pytest.mark.turns
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("session", [PlainBackward, DividedByTheUser])
def test_other_backwards_give_the_same(session, stage):
    job, plan = StackJob(), Plan(ranks=RANKS, steps=3, accumulation=3, clip=0.1)
    job.name = "plain stack"
    oracle.compare(train_on_threads(job, plan, opened_by(session, stage)), oracle.kept(job, plan))


@pytest.mark.parametrize("stage", STAGES)
def test_plain_backward_in_fp16_is_scaled_too(stage):
    job = StackJob()
    job.name = "plain stack"
    plan = Plan(ranks=RANKS, steps=3, accumulation=2, precision="fp16", scale=4096.0)
    got = train_on_threads(job, plan, opened_by(PlainBackward, stage))
    oracle.accept(got, job, plan, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_no_sync_around_all_but_the_last_micro_batch(stage):
    windows = [[(1 / 3, 0), (1 / 3, 1), (1 / 3, 2)]] * 2
    want, norms = by_hand(plain_sgd, windows, RANKS)

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage, Plan(accumulation=3)))
        found = []
        for step in range(2):
            for micro in range(3):
                with engine.no_sync() if micro < 2 else nullcontext():
                    engine.backward(squared(engine, At(step, micro, rank)))
                engine.step()
            found.append(engine.get_global_grad_norm())
        return full_weights(engine), found

    for weights, found in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want)
        assert found == pytest.approx(norms, rel=1e-5)


@pytest.mark.turns
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("step_every_time", [True, False])
def test_the_boundary_set_from_outside_with_a_short_last_window(stage, step_every_time):
    """Accelerate's way: it says where a window ends; the last one is shorter; step() may be called
    at boundaries only.
    """
    windows = [
        [(1 / 3, micro) for micro in range(3)],
        [(1 / 3, micro) for micro in range(3)],
        [(1 / 2, 0), (1 / 2, 1)],
    ]
    want, norms = by_hand(plain_sgd, windows, RANKS)

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage, Plan(accumulation=3)))
        found = []
        for step, window in enumerate(windows):
            for weight, micro in window:
                last = micro == len(window) - 1
                engine.set_gradient_accumulation_boundary(last)
                assert engine.is_gradient_accumulation_boundary() is last
                engine.backward(
                    squared(engine, At(step, micro, rank)) * weight, scale_wrt_gas=False
                )
                if last or step_every_time:
                    engine.step()
            found.append(engine.get_global_grad_norm())
        assert engine.counters.global_steps == 3
        return full_weights(engine), found

    for weights, found in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want)
        assert found == pytest.approx(norms, rel=1e-5)


@pytest.mark.turns
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_windows_that_steps_end(stage, offload, heard):
    """``managed_gradient_accumulation: false``: each step uses what came since the last, whatever
    number of micro-batches that is.
    """
    windows = [[(1 / 4, micro) for micro in range(count)] for count in (2, 12, 1)]
    want, norms = by_hand(plain_sgd, windows, RANKS)
    more = {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}}

    def run(rank, model):
        config = config_of(stage, Plan(accumulation=4), **(more if offload else {}))
        config["managed_gradient_accumulation"] = False
        engine = start(model, plain_sgd(model), config)
        found, samples = [], []
        for step, window in enumerate(windows):
            for _, micro in window:
                engine.backward(squared(engine, At(step, micro, rank)))
                assert engine.window_is_open and not engine.is_gradient_accumulation_boundary()
            engine.step()
            assert engine.was_step_applied() and not engine.window_is_open
            found.append(engine.get_global_grad_norm())
            samples.append(engine.global_samples // (RANKS * ROWS))
        engine.backward(squared(engine, At(9, 9, rank)))
        engine.zero_grad()
        assert samples == [2, 14, 15] and engine.micro_steps == 15 and not engine.window_is_open
        with pytest.raises(UnmanagedWindowError, match="every step"):
            engine.set_gradient_accumulation_boundary(True)
        return full_weights(engine), found

    for weights, found in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want)
        assert found == pytest.approx(norms, rel=1e-5)
    assert not any("without engine.step()" in line for line in heard)


@pytest.mark.parametrize("stage", STAGES)
@on_each_rank(RANKS)
def test_steps_are_counted_and_weights_rest_inside_a_window(rank, model, stage):
    engine = start(model, plain_sgd(model), config_of(stage, Plan(accumulation=2)))
    first = full_weights(engine)
    assert engine.gradient_accumulation_steps() == 2
    seen = []
    for micro in range(4):
        seen.append(engine.is_gradient_accumulation_boundary())
        engine.backward(squared(engine, At(0, micro, rank)))
        engine.step()
        same = all(torch.equal(a, first[name]) for name, a in full_weights(engine).items())
        assert same == (micro == 0), f"after micro-batch {micro}"
        assert engine.was_step_applied() == (micro % 2 == 1)
    assert seen == [False, True, False, True]
    assert engine.counters.micro_steps == 4
    assert engine.counters.global_steps == 2
    assert engine.counters.global_samples == 4 * RANKS * engine.train_micro_batch_size_per_gpu()


@pytest.mark.parametrize("stage", STAGES)
def test_the_optimizers_zero_grad_after_every_micro_batch_leaves_the_window(stage):
    """A loop written for DeepSpeed calls ``zero_grad`` and ``step`` each time, and the engine knows
    where the window ends.
    """
    want, _ = by_hand(plain_sgd, [[(0.5, 0), (0.5, 1)]] * 2, RANKS)

    def run(rank, model):
        optimizer = plain_sgd(model)
        engine = start(model, optimizer, config_of(stage, Plan(accumulation=2)))
        for step in range(2):
            for micro in range(2):
                engine.backward(squared(engine, At(step, micro, rank)))
                engine.step()
                optimizer.zero_grad()
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want)


@pytest.mark.parametrize("stage", STAGES)
def test_zero_grad_drops_a_window(stage):
    want, _ = by_hand(plain_sgd, [[(0.5, 0), (0.5, 1)]], RANKS)

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage, Plan(accumulation=2)))
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(squared(engine, At(9, 9, rank)))
        engine.zero_grad()
        for micro in range(2):
            engine.set_gradient_accumulation_boundary(micro == 1)
            engine.backward(squared(engine, At(0, micro, rank)))
            engine.step()
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want)


def test_a_window_is_open_while_gradients_wait():
    """Between micro-batches, whether ``step()`` is called after each (as in loops of DeepSpeed) or
    at the end alone (as Accelerate does); ``zero_grad`` closes it.
    """

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(2, Plan(accumulation=3)))

        def backward(micro, ends):
            engine.set_gradient_accumulation_boundary(ends)
            engine.backward(squared(engine, At(0, micro, rank)))

        for steps_every_time in (True, False):
            assert not engine.window_is_open
            for micro in range(3):
                backward(micro, micro == 2)
                assert engine.window_is_open
                if steps_every_time or micro == 2:
                    engine.step()
                assert engine.window_is_open is (micro < 2)
        backward(0, False)
        backward(1, False)
        with pytest.raises(PartitionError, match="inside an accumulation window"):
            engine.set_train_batch_size(RANKS * ROWS)
        engine.zero_grad()
        assert not engine.window_is_open
        engine.set_train_batch_size(RANKS * ROWS)

    on_ranks(RANKS, run)
