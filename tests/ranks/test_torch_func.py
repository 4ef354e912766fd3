"""torch.func through the model: as in plain torch at stages 0 to 2, refused at stage 3; nothing
is left behind either way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap

from hf_zero.errors import PartitionError
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import floats
from tests.helpers.stacks import by_hand, on_each_rank, run_steps, squared, stack
from tests.helpers.training import Plan, plain_sgd
from tests.ranks.cases import expect, trains_alike, values_of

X = floats(0, 0, 0, 3, 7)


def loss_of(model):
    return lambda parameters, x: functional_call(model, parameters, (x,)).pow(2).sum()


WAYS: dict[str, Callable[..., Any]] = {
    "grad of the input": lambda net, model: grad(lambda x: net(x).pow(2).sum())(X),
    "grad of the weights": lambda net, model: grad(loss_of(model))(values_of(model), X),
    "each sample": lambda net, model: vmap(grad(loss_of(model)), in_dims=(None, 0))(
        values_of(model), X[:, None]
    ),
    "jacrev": lambda net, model: jacrev(net)(X[:1]),
}
ALONE: dict[str, Callable[..., Any]] = {  # torch keeps levels of forward mode for all threads
    "jvp": lambda net, model: jvp(net, (X,), (X,)),
    "hessian": lambda net, model: hessian(lambda x: net(x).sum())(X[:1]),
}
MORE: dict[str, dict[str, Any]] = {
    "checkpointed": {"activation_checkpointing": {"blocks": True}},
    "activations on the CPU": {"activation_checkpointing": {"cpu_checkpointing": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 64.0}},
}


@in_turn(
    "way, stage",
    [("grad of the input", 1), ("grad of the weights", 2), ("each sample", 0), ("jacrev", 1)],
)
def test_a_transform_gives_what_it_gives_in_plain_torch(way, stage):
    """Also between a forward and its backward."""
    want = WAYS[way](stack(), stack())

    def micro(net, at):
        loss = None
        for _ in range(2):
            if at.step == 0:
                called = net if at.rank else net.module
                torch.testing.assert_close(WAYS[way](called, net.module), want)
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


AROUND = [(more, "grad of the input") for more in MORE]


@in_turn("more, way", [*AROUND, ("checkpointed", "each sample")])
@on_each_rank(1)
def test_a_transform_of_a_model_with_more_around_its_blocks(rank, model, more, way):
    want = WAYS[way](stack(), stack())
    engine = start(model, plain_sgd(model), config_of(2, **MORE[more]))
    half = more == "fp16"
    got = WAYS[way](lambda x: model(x.half()).float() if half else engine(x), model)
    torch.testing.assert_close(got, want, **({"rtol": 3e-2, "atol": 3e-2} if half else {}))
    run_steps(engine, rank, range(1))


def test_a_loss_over_a_gradient_trains_the_weights():
    """The backward goes through what the transform has recorded."""

    def micro(net, at):
        loss = grad(lambda x: net(x).pow(2).sum())(X).pow(2).mean()
        net.backward(loss)
        return loss

    trains_alike(micro, 1, Plan(2, 1))


@in_turn("way", ["grad of the input", "jacrev"])
def test_stage_3_refuses_a_transform_before_it_does_anything(way):
    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(3))
        with pytest.raises(PartitionError, match=r"torch\.func goes through \(root\)"):
            WAYS[way](engine, model)
        engine.schedule.check_all_released()
        run_steps(engine, rank, range(2))
        return full_weights(engine)

    expect(by_hand(plain_sgd, [[(1.0, 0)], [(1.0, 0)]], 2)[0], run)


@in_turn("stage", (1, 3))
def test_vmap_alone_trains_at_every_stage(stage):
    def micro(net, at):
        loss = vmap(net)(X).pow(2).mean()
        net.backward(loss)
        return loss

    trains_alike(micro, stage, Plan(2, 1))


@in_turn("stage, accumulation", [(0, 1), (2, 2)])
def test_first_order_maml_trains_as_in_plain_torch(stage, accumulation):
    """A backward without gradients of parameters comes first (arXiv:1703.03400)."""

    def micro(net, at):
        x, weights = floats(at.step, at.micro, at.rank, 3, 7), dict(net.module.named_parameters())
        inner = functional_call(net.module, weights, (x,)).pow(2).mean()
        grads = torch.autograd.grad(inner, list(weights.values()))
        fast = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), grads)}
        loss = functional_call(net.module, fast, (x,)).pow(2).mean()
        net.backward(loss)
        return loss

    trains_alike(micro, stage, Plan(2, 3, accumulation))
