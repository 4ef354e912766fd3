"""Scripts beside the plain loop: ranks that diverge are named, the rest is computed as in a plain
loop; warnings about a training that goes wrong without an error, once, of rank 0. Passes that
raise are in test_endings.py, refusals in one process in tests/zero.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.distributed.world_group import raise_on_all_ranks
from hf_zero.engine import Engine
from hf_zero.errors import PartitionError, RankMismatchError
from hf_zero.zero.step.step_reports import SanityChecks
from tests.helpers import oracle
from tests.helpers.engines import STAGES, config_of, full_grads, full_weights, start
from tests.helpers.host_syncs import HostSyncs
from tests.helpers.models import features
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, run_steps, squared, stack
from tests.helpers.training import At, Plan, adamw, plain_sgd, trainable

RANKS = 2


@on_each_rank(RANKS)
def test_a_rank_that_does_not_come_is_named(rank, model):
    engine = start(model, adamw(model), config_of(3, timeout=2))
    if rank == 0:
        with pytest.raises(RankMismatchError, match=r"ranks? 1\b"):
            squared(engine, At(0, 0, rank))


def test_work_that_fails_on_one_rank_is_given_up_by_all():
    def run(rank, model):
        error, told = (
            (OSError, "disk")
            if rank == 1
            else (RankMismatchError, "rank 1 could not read: OSError: disk")
        )
        with pytest.raises(error, match=told), raise_on_all_ranks("read"):
            if rank == 1:
                raise OSError("disk")
        with raise_on_all_ranks("read"):
            pass
        return start(model, adamw(model), config_of(3)).global_rank

    assert on_ranks(RANKS, run) == [0, 1]


@pytest.mark.parametrize("stage", STAGES)
def test_rank_0s_values_reach_every_rank(stage):
    """Ranks that initialised with other seeds start from rank 0's model."""

    def run(rank, model):
        if rank == 1:
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(1.0)
        engine = start(model, adamw(model), config_of(stage))
        return full_weights(engine)

    want = {name: p.detach() for name, p in stack().named_parameters()}
    for weights in on_ranks(RANKS, run):
        assert all(torch.equal(weights[name], value) for name, value in want.items())


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_outside_the_optimizer_rest_and_leave_no_gradient_behind(stage):
    """requires_grad without a group: gradients flow through, nothing is trained, nothing piles
    up.
    """

    def half(model):
        return torch.optim.SGD([*model.blocks[0].parameters(), *model.head.parameters()], lr=0.05)

    want, _ = by_hand(half, [[(1.0, 0)]] * 3, RANKS)

    def run(rank, model):
        engine = start(model, half(model), config_of(stage))
        run_steps(engine, rank, range(3))
        from hf_zero.zero.layout.parameter import raw_grad

        assert [name for name, p in model.named_parameters() if raw_grad(p) is not None] == []
        return {name: p.detach().clone() for name, p in engine.consolidated()}

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want)


@pytest.mark.parametrize("stage", STAGES)
def test_autocast_around_the_engine(stage):
    """fp32 weights under torch.autocast: one step, since rounding to bf16 amplifies any
    difference afterwards.
    """

    def plain():
        model = stack()
        for rank in range(RANKS):
            with torch.autocast("cpu", torch.bfloat16):
                loss = squared(model, At(0, 0, rank)) / RANKS
            loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage))
        with torch.autocast("cpu", torch.bfloat16):
            loss = squared(engine, At(0, 0, rank))
        engine.backward(loss)
        engine.step()
        return full_weights(engine)

    start_weights = {name: p.detach() for name, p in stack().named_parameters()}
    want = {name: start_weights[name] - 0.05 * grad for name, grad in plain().items()}
    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want)


@pytest.mark.parametrize("stage", STAGES)
@on_each_rank(RANKS)
def test_fp16_inputs_are_cast_by_auto_cast(rank, model, stage):
    config = config_of(stage, fp16={"enabled": True, "loss_scale": 128.0, "auto_cast": True})
    engine = start(model, plain_sgd(model), config)
    loss = squared(engine, At(0, 0, rank))  # fp32 features
    engine.backward(loss)
    engine.step()
    assert not engine.optimizer.overflow


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_gradients(stage):
    """A penalty on the gradient of the input: right where weights stay whole, refused where they
    do not.
    """

    def penalised(net, rank):
        x = features(0, 0, rank).requires_grad_()
        loss = net(x).pow(2).mean()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.pow(2).sum()

    model = stack()
    for rank in range(RANKS):
        (penalised(model, rank) / RANKS).backward()
    want = {
        name: p.detach() - 0.05 * (p.grad if p.grad is not None else 0.0)
        for name, p in model.named_parameters()
    }

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage))
        if stage == 3:
            with pytest.raises(PartitionError, match=r"create_graph=True at stage 3.*use stage 2"):
                penalised(engine, rank)
            return want
        engine.backward(penalised(engine, rank))
        engine.step()
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want)


@pytest.mark.turns
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "options", [{"fused": True}, {"amsgrad": True}, {"maximize": True}, {"foreach": True}], ids=str
)
def test_options_of_the_users_adamw(stage, options):
    def made(model):
        return torch.optim.AdamW(trainable(model), lr=1e-3, eps=1e-6, **options)

    want, _ = by_hand(made, [[(1.0, 0)]] * 3, RANKS)

    def run(rank, model):
        engine = start(model, made(model), config_of(stage, Plan(clip=0.0)))
        run_steps(engine, rank, range(3))
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want, floor=oracle.ADAM_ROUNDING)


@pytest.mark.turns
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "how", ["two forwards", "a part beside the model", "a part before the model"]
)
def test_a_plain_fp16_backward_that_cannot_be_scaled_once(stage, how):
    """The loss scale is put in where the model gives its outputs away: twice would square it,
    and a part has no such place.
    """

    def loss_of(model, rank):
        x = features(0, 0, rank).half()
        if how == "two forwards":
            return squared(model, At(0, 0, rank), torch.float16) + squared(
                model, At(1, 0, rank), torch.float16
            )
        inner = (
            model.blocks[0](torch.ones(3, 32, dtype=torch.float16, requires_grad=True))
            .float()
            .pow(2)
            .mean()
        )
        outer = model(x).float().pow(2).mean()
        return outer + inner if how == "a part beside the model" else inner + outer

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage, Plan(precision="fp16")))
        with pytest.raises(
            PartitionError, match=r"several fp16 forwards or engines.*call engine\.backward\(loss\)"
        ):
            loss_of(model, rank).backward()
        engine.zero_grad()
        loss = squared(model, At(0, 0, rank), torch.float16)
        loss.backward()
        plain = full_grads(engine)
        engine.zero_grad()
        engine.backward(squared(engine, At(0, 0, rank), torch.float16))
        for name, grad in full_grads(engine).items():
            assert torch.equal(grad, plain[name]), name
        engine.zero_grad()
        engine.backward(loss_of(model, rank))
        engine.step()
        assert engine.get_global_grad_norm() > 0

    on_ranks(RANKS, run)


def engine_of(model, stage=2, precision="fp32", accumulation=1):
    config = config_of(stage, Plan(accumulation=accumulation, precision=precision))
    engine: Engine = start(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    return engine


def loss_of(engine):
    loss: torch.Tensor = engine(features(0, 0, 0).to(engine.flats[0].dtype)).float().pow(2).mean()
    return loss


def of_finite(messages):
    return [message for message in messages if "Look at the learning rate" in message]


def diverges(rank, models, stage, precision):
    engine = engine_of(models[rank], stage, precision)
    for step in range(4):
        engine.backward(loss_of(engine) * (1.0 if step < 2 else float("nan")))
        with HostSyncs() as syncs:
            engine.step()
        assert not syncs.of("hf_zero")
    engine.destroy()


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (2, "bf16"), (3, "fp32")])
def test_a_loss_that_is_not_finite_is_named_once(stage, precision, heard):
    run_ranks(2, diverges, [stack(), stack()], stage, precision)
    (message,) = of_finite(heard)
    assert message.startswith("step 3: the loss of rank 0 is nan and the gradient norm nan")
    assert "set_detect_anomaly(True)" in message and ("bf16" in message) is (precision == "bf16")


def one_rank_diverges(rank, models):
    engine = engine_of(models[rank])
    engine.backward(loss_of(engine) * (float("inf") if rank == 1 else 1.0))
    engine.step()
    engine.destroy()


def test_the_norm_tells_of_the_other_ranks(heard):
    run_ranks(2, one_rank_diverges, [stack(), stack()])
    (message,) = of_finite(heard)
    assert message.startswith("step 1: the gradient norm is ")


def test_labels_that_are_all_ignored(heard):
    """Their loss is NaN, their gradient is zero."""
    engine = engine_of(stack())
    logits = engine(features(0, 0, 0))
    engine.backward(nn.functional.cross_entropy(logits, torch.full((len(logits),), -100)))
    engine.step()
    engine.destroy()
    (message,) = of_finite(heard)
    assert (
        "the loss of rank 0 is nan and the gradient norm 0; the weights are still finite" in message
    )


def test_an_overflow_in_fp16_is_the_scales_business(heard):
    engine = engine_of(stack(), precision="fp16")
    engine.backward(loss_of(engine) * float("inf"))
    engine.step()
    assert engine.skipped_steps == 1 and not of_finite(heard)
    engine.destroy()


def test_backwards_that_no_step_follows(heard):
    engine = engine_of(stack(), accumulation=2)
    for _ in range(12):
        engine.backward(loss_of(engine))
    (message,) = (text for text in heard if "without engine.step()" in text)
    assert message.startswith("9 backwards") and "inside a window of 2 micro-batches" in message
    engine.destroy()


def test_a_loop_that_collects_micro_batches_by_itself(heard):
    """It steps once a window: each step counts one micro-batch, and nothing is updated."""
    engine = engine_of(stack(), accumulation=3)
    for _ in range(4):
        for _ in range(3):
            engine.backward(loss_of(engine))
        engine.step()
    assert engine.global_steps == 1
    (message,) = (text for text in heard if "has counted one micro-batch of 3" in text)
    assert message.startswith("engine.step() after 3 backwards") and "steps to 1" in message
    engine.destroy()


def test_steps_after_each_backward_are_no_news(heard):
    engine = engine_of(stack(), accumulation=3)
    for _ in range(6):
        engine.backward(loss_of(engine))
        engine.step()
    assert engine.global_steps == 2
    assert not any("has counted one micro-batch" in text for text in heard)
    engine.destroy()


def test_a_window_of_another_size_is_known(heard):
    engine = engine_of(stack())
    engine.accumulation.steps = 12
    for _ in range(12):
        engine.backward(loss_of(engine))
        engine.step()
    assert engine.global_steps == 1
    engine.set_gradient_accumulation_boundary(True)
    for _ in range(12):
        engine.backward(loss_of(engine))
    engine.step()
    engine.destroy()
    assert not any("one micro-batch" in text or "backwards without" in text for text in heard)


def without_warning(engine):
    for _ in range(6):  # gradients of three losses
        for _ in range(3):
            engine.backward(loss_of(engine))
        engine.step()
    for _ in range(6):  # gradients alone
        engine.backward(loss_of(engine))
        engine.zero_grad()
        engine.backward(loss_of(engine))
    engine.step()
    engine.set_gradient_accumulation_boundary(False)
    for _ in range(12):  # a window as long as the script says
        engine.backward(loss_of(engine))
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(loss_of(engine))
    engine.step()
    with engine.no_sync():
        for _ in range(12):
            engine.backward(loss_of(engine))
    engine.backward(loss_of(engine))
    engine.step()


def test_windows_that_a_script_chooses(heard):
    engine = engine_of(stack())
    without_warning(engine)
    engine.destroy()
    assert not any("without engine.step()" in text for text in heard)


class Event:
    over = False

    def query(self):
        return self.over


def test_on_a_device_the_norm_is_read_when_its_copy_is_over(monkeypatch, heard):
    event, copies = Event(), []
    monkeypatch.setattr(
        "hf_zero.zero.step.step_reports.streams.record_here",
        lambda device: copies.append(device) or event,
    )
    checks = SanityChecks(torch.device("cpu"), SimpleNamespace(steps=1), "fp32", 0)
    monkeypatch.setattr(checks, "_on_host", False)
    nan: Any = torch.tensor(float("nan"), dtype=torch.float64)
    for step in (1, 2, 3):
        checks.on_norm(nan, step)
        assert len(copies) == 1 and not heard
    event.over = True
    checks.on_norm(nan, 4)
    checks.on_norm(nan, 5)
    (message,) = heard
    assert message.startswith("step 1: the gradient norm is nan") and len(copies) <= 2
