"""Scripts beside the plain loop: ranks that diverge are named, the rest is computed as in a plain
loop; warnings about a training that goes wrong without an error, once, of rank 0. Transforms of
``torch.func``. Passes that raise are in test_endings.py, refusals in one process in tests/zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap

from hf_zero.errors import PartitionError, RankMismatchError
from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_grads, full_weights, start, still_gathered
from tests.helpers.host_syncs import HostSyncs
from tests.helpers.models import features, floats
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, run_steps, squared, stack
from tests.helpers.training import At, Plan, adamw, plain_sgd
from tests.ranks.cases import expect, trains_alike, values_of

RANKS = 2


@on_each_rank(RANKS)
def test_a_rank_that_does_not_come_is_named(rank, model):
    engine = start(model, adamw(model), config_of(3, timeout=2))
    if rank == 0:
        with pytest.raises(RankMismatchError, match=r"ranks? 1\b"):
            squared(engine, At(0, 0, rank))


def test_autocast_around_the_engine():
    """One step, since rounding to bf16 amplifies any difference afterwards."""

    def micro(net, at):
        with torch.autocast("cpu", torch.bfloat16):
            loss = squared(net, at)
        net.backward(loss)
        return loss

    trains_alike(micro, 3, Plan(RANKS, 1))


@on_each_rank(RANKS)
def test_fp16_inputs_are_cast_by_auto_cast(rank, model):
    config = config_of(3, fp16={"enabled": True, "loss_scale": 128.0, "auto_cast": True})
    engine = start(model, plain_sgd(model), config)
    engine.backward(squared(engine, At(0, 0, rank)))  # fp32 features
    engine.step()
    assert not engine.optimizer.overflow


@in_turn("stage", (2, 3))
def test_gradients_of_gradients(stage):
    """A penalty on the gradient of the input is refused where weights do not stay whole."""

    def micro(net, at):
        x = features(at.step, at.micro, at.rank).requires_grad_()
        loss = net(x).pow(2).mean()
        if stage == 3 and hasattr(net, "engine"):
            with pytest.raises(PartitionError, match="create_graph=True at stage 3"):
                torch.autograd.grad(loss, x, create_graph=True)
            net.engine.zero_grad()
            loss = net(x).pow(2).mean()
        elif stage < 3:
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + slope.pow(2).sum()
        net.backward(loss)
        return loss

    trains_alike(micro, stage, Plan(RANKS, 2))


def two_forwards(model, rank):
    return squared(model, At(0, 0, rank), torch.float16) + squared(
        model, At(1, 0, rank), torch.float16
    )


def beside_a_part(model, rank):
    inside = torch.ones(3, 32, dtype=torch.float16, requires_grad=True)
    return squared(model, At(0, 0, rank), torch.float16) + model.blocks[0](inside).float().mean()


def after_a_part(model, rank):
    inside = torch.ones(3, 32, dtype=torch.float16, requires_grad=True)
    return model.blocks[0](inside).float().mean() + squared(model, At(0, 0, rank), torch.float16)


@in_turn("stage, loss_of", [(0, two_forwards), (3, beside_a_part), (3, after_a_part)])
@on_each_rank(RANKS)
def test_a_plain_fp16_backward_that_cannot_be_scaled_once(rank, model, stage, loss_of):
    """The loss scale is put in where the whole model gives its outputs away."""
    engine = start(model, plain_sgd(model), config_of(stage, Plan(precision="fp16")))
    with pytest.raises(PartitionError, match="several fp16 forwards or engines"):
        loss_of(model, rank).backward()
    engine.zero_grad()
    found = []
    for backward in (torch.Tensor.backward, engine.backward):
        backward(squared(engine, At(0, 0, rank), torch.float16))
        found.append(full_grads(engine))
        engine.zero_grad()
    oracle.compare_tensors("gradients", *found, 0.0, 0.0)
    engine.backward(loss_of(model, rank))
    engine.step()
    assert engine.get_global_grad_norm() > 0


def engine_of(model, stage=2, precision="fp32") -> Any:
    config = config_of(stage, Plan(precision=precision))
    return start(model, torch.optim.SGD(model.parameters(), lr=0.1), config)


def loss_of(engine):
    return squared(engine, At(0, 0, 0), engine.flats[0].dtype)


def backwards(engine, count):
    for _ in range(count):
        engine.backward(loss_of(engine))


def of_finite(messages):
    return [message for message in messages if "Look at the learning rate" in message]


@in_turn("stage, precision", [(0, "fp32"), (3, "bf16")])
def test_a_loss_that_is_not_finite_is_named_once(stage, precision, heard):
    heard.clear()

    def diverges(rank, model):
        engine = engine_of(model, stage, precision)
        for step in range(4):
            engine.backward(loss_of(engine) * (1.0 if step < 2 else float("nan")))
            with HostSyncs() as syncs:
                engine.step()
            assert not syncs.of("hf_zero")
        engine.destroy()

    on_ranks(2, diverges)
    (message,) = of_finite(heard)
    assert message.startswith("step 3: the loss of rank 0 is nan and the gradient norm nan")
    assert "set_detect_anomaly(True)" in message and ("bf16" in message) is (precision == "bf16")


def test_the_norm_tells_of_the_other_ranks(heard):
    def diverges(rank, model):
        engine = engine_of(model)
        engine.backward(loss_of(engine) * (float("inf") if rank == 1 else 1.0))
        engine.step()

    on_ranks(2, diverges)
    (message,) = of_finite(heard)
    assert message.startswith("step 1: the gradient norm is ")


def test_labels_that_are_all_ignored_and_an_overflow_in_fp16(heard):
    """The loss of the former is NaN, its gradient is zero; the latter is the scale's business."""
    engine = engine_of(stack(), precision="fp16")
    engine.backward(loss_of(engine) * float("inf"))
    engine.step()
    assert engine.skipped_steps == 1 and not of_finite(heard)
    engine.destroy()
    engine = engine_of(stack())
    logits = engine(features(0, 0, 0))
    engine.backward(nn.functional.cross_entropy(logits, torch.full((len(logits),), -100)))
    engine.step()
    engine.destroy()
    (message,) = of_finite(heard)
    assert "loss of rank 0 is nan and the gradient norm 0; the weights are still finite" in message


def never_steps(engine):
    engine.accumulation.set_accumulation_steps(2)
    backwards(engine, 12)


def collects_by_itself(engine):
    """It steps once a window: each step counts one micro-batch, and nothing is updated."""
    engine.accumulation.set_accumulation_steps(3)
    for _ in range(4):
        backwards(engine, 3)
        engine.step()
    assert engine.global_steps == 1


def windows_of_a_script(engine):
    for _ in range(6):  # gradients of three losses
        backwards(engine, 3)
        engine.step()
    for _ in range(6):  # gradients alone
        backwards(engine, 1)
        engine.zero_grad()
        backwards(engine, 1)
    engine.step()
    engine.set_gradient_accumulation_boundary(False)
    backwards(engine, 12)  # a window as long as the script says
    engine.set_gradient_accumulation_boundary(True)
    backwards(engine, 1)
    engine.step()
    with engine.no_sync():
        backwards(engine, 12)
    backwards(engine, 1)
    engine.step()


LOOPS: dict[Any, tuple[str, ...]] = {  # what a warning says, if there is one
    never_steps: ("9 backwards", "without engine.step()", "inside a window of 2 micro-batches"),
    collects_by_itself: (
        "engine.step() after 3 backwards",
        "has counted one micro-batch of 3",
        "steps to 1",
    ),
    windows_of_a_script: (),
}


@in_turn("script", LOOPS)
def test_loops_and_their_warnings(script, heard):
    heard.clear()
    engine = engine_of(stack())
    script(engine)
    engine.destroy()
    said = [text for text in heard if "one micro-batch" in text or "engine.step()" in text]
    assert len(said) == bool(LOOPS[script])
    assert all(words in said[0] for words in LOOPS[script])


X = floats(0, 0, 0, 3, 7)


def sum_of(model):
    return lambda parameters, x: functional_call(model, parameters, (x,)).pow(2).sum()


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad of the input": lambda net, model: grad(lambda x: net(x).pow(2).sum())(X),
    "grad of the weights": lambda net, model: grad(sum_of(model))(values_of(model), X),
    "each sample": lambda net, model: vmap(grad(sum_of(model)), in_dims=(None, 0))(
        values_of(model), X[:, None]
    ),
    "jacrev": lambda net, model: jacrev(net)(X[:1]),
}
ALONE: dict[str, Callable[..., Any]] = {  # torch keeps levels of forward mode for all threads
    "jvp": lambda net, model: jvp(net, (X,), (X,)),
    "hessian": lambda net, model: hessian(lambda x: net(x).sum())(X[:1]),
}


@in_turn(
    "way, stage",
    [("grad of the input", 1), ("grad of the weights", 2), ("each sample", 0), ("jacrev", 1)],
)
def test_a_transform_gives_what_it_gives_in_plain_torch(way, stage):
    """Also between a forward and its backward."""
    want = TRANSFORMS[way](stack(), stack())

    def micro(net, at):
        loss = None
        for _ in range(2):
            if at.step == 0:
                called = net if at.rank else net.module
                torch.testing.assert_close(TRANSFORMS[way](called, net.module), want)
            loss = squared(net, at) if loss is None else loss
        net.backward(loss)
        return loss

    trains_alike(micro, stage, Plan(2, 2))


@in_turn("way", ALONE)
@on_each_rank(1)
def test_forward_mode(rank, model, way):
    engine = start(model, plain_sgd(model), config_of(1))
    torch.testing.assert_close(ALONE[way](engine, model), ALONE[way](stack(), stack()))
    run_steps(engine, rank, range(1))


def test_stage_3_refuses_a_transform_before_it_does_anything():
    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(3))
        with pytest.raises(PartitionError, match=r"torch\.func goes through \(root\)"):
            TRANSFORMS["jacrev"](engine, model)
        assert not still_gathered(engine)
        run_steps(engine, rank, range(2))
        return full_weights(engine)

    expect(by_hand(plain_sgd, [[(1.0, 0)], [(1.0, 0)]], 2)[0], run)


LOSSES: dict[str, Callable[..., Any]] = {  # the backward goes through what has been recorded
    "of a gradient": lambda net: grad(lambda x: net(x).pow(2).sum())(X).pow(2).mean(),
    "of vmap": lambda net: vmap(net)(X).pow(2).mean(),
}


@in_turn("loss, stage", [("of a gradient", 1), ("of vmap", 1), ("of vmap", 3)])
def test_a_loss_through_a_transform_trains_the_weights(loss, stage):
    def micro(net, at):
        found = LOSSES[loss](net)
        net.backward(found)
        return found

    trains_alike(micro, stage, Plan(2, 1))
