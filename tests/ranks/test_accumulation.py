"""Division of the loss and the end of a window: engine.backward and loss.backward, no_sync, the
boundary set from outside.
"""

from contextlib import nullcontext

import pytest

from hf_zero.errors import PartitionError, UnmanagedWindowError
from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.engines import OnEngine, config_of, full_weights, start, train_on_threads
from tests.helpers.models import ROWS
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, squared
from tests.helpers.training import At, Plan, StackJob, plain_sgd

RANKS = 2


class PlainBackward(OnEngine):
    def backward(self, loss):
        loss.backward()


class DividedByTheUser(OnEngine):
    """A driver that divides the loss itself and tells the engine so, like the Trainer."""

    def backward(self, loss):
        steps = self.engine.gradient_accumulation_steps()
        self.engine.backward(loss / steps, scale_wrt_gas=False)


@in_turn(
    "session, stage, precision",
    [
        (PlainBackward, 3, "fp32"),
        (PlainBackward, 0, "fp16"),
        (PlainBackward, 2, "fp16"),
        (DividedByTheUser, 1, "fp32"),
    ],
)
def test_other_backwards_give_the_same(session, stage, precision):
    job = StackJob()
    job.name = "plain stack"
    plan = Plan(RANKS, 2, 3, precision, clip=0.1, scale=4096.0)

    def opened(model, optimizer, plan):
        return session(start(model, optimizer, config_of(stage, plan)), plan)

    oracle.accept(train_on_threads(job, plan, opened), job, plan, stage)


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


@in_turn("stage", (1, 3))
def test_no_sync_around_all_but_the_last_micro_batch(stage):
    def loop(engine, rank, step, window):
        for micro in range(3):
            with engine.no_sync() if micro < 2 else nullcontext():
                engine.backward(squared(engine, At(step, micro, rank)))
            engine.step()

    compare([[(1 / 3, micro) for micro in range(3)]] * 2, loop, stage, 3)


@in_turn("stage, step_every_time", [(1, False), (3, True)])
def test_the_boundary_set_from_outside_with_a_short_last_window(stage, step_every_time):
    """Accelerate says where a window ends, and may call step() there only."""

    def loop(engine, rank, step, window):
        for weight, micro in window:
            last = micro == len(window) - 1
            engine.set_gradient_accumulation_boundary(last)
            assert engine.is_gradient_accumulation_boundary() is last
            engine.backward(squared(engine, At(step, micro, rank)) * weight, scale_wrt_gas=False)
            if last or step_every_time:
                engine.step()
        assert engine.counters.global_steps == step + 1

    compare([[(1 / n, micro) for micro in range(n)] for n in (3, 3, 2)], loop, stage, 3)


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
        engine.backward(squared(engine, At(9, 9, rank)))
        engine.zero_grad()
        assert engine.micro_steps == samples[step] and not engine.window_is_open
        with pytest.raises(UnmanagedWindowError, match="every step"):
            engine.set_gradient_accumulation_boundary(True)

    more = {"zero_optimization": zero, "managed_gradient_accumulation": False}
    compare([[(1 / 4, m) for m in range(n)] for n in (2, 12, 1)], loop, stage, 4, **more)
    assert not any("without engine.step()" in line for line in heard)


@in_turn("stage", (1, 3))
def test_zero_grad_of_optimizer_and_engine(stage):
    """The optimizer's leaves the engine's window; the engine's drops one."""

    def loop(engine, rank, step, window):
        if step == 1:
            engine.set_gradient_accumulation_boundary(False)
            engine.backward(squared(engine, At(9, 9, rank)))
            engine.zero_grad()
        for micro in range(2):
            if step == 1:
                engine.set_gradient_accumulation_boundary(micro == 1)
            engine.backward(squared(engine, At(step, micro, rank)))
            engine.step()
            engine.optimizer.zero_grad()

    compare([[(0.5, 0), (0.5, 1)]] * 2, loop, stage, 2)


@on_each_rank(RANKS)
def test_a_window_is_open_while_gradients_wait(rank, model):
    """Whether ``step()`` is called after each micro-batch or at the end alone."""
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
