"""torch.func through the model: as in plain torch at stages 0 to 2, refused at stage 3; nothing
is left behind either way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap

from hf_zero.errors import PartitionError
from tests.helpers.engines import STAGES, config_of, full_weights, start
from tests.helpers.models import floats
from tests.helpers.oracle import compare_tensors
from tests.helpers.stacks import by_hand, on_ranks, run_steps, squared, stack
from tests.helpers.training import At, Plan, plain_sgd

X = floats(0, 0, 0, 3, 7)
Way = Callable[[Any, nn.Module], Any]


def _parameters(model):
    return {name: p.detach() for name, p in model.named_parameters()}


def _loss(model):
    return lambda parameters, x: functional_call(model, parameters, (x,)).pow(2).sum()


WAYS: dict[str, Way] = {
    "grad of the input": lambda net, model: grad(lambda x: net(x).pow(2).sum())(X),
    "grad of the weights": lambda net, model: grad(_loss(model))(_parameters(model), X),
    "each sample": lambda net, model: vmap(grad(_loss(model)), in_dims=(None, 0))(
        _parameters(model), X[:, None]
    ),
    "jacrev": lambda net, model: jacrev(net)(X[:1]),
}
ALONE: dict[str, Way] = {  # torch keeps the levels of forward-mode derivatives for all threads
    "jvp": lambda net, model: jvp(net, (X,), (X,)),
    "hessian": lambda net, model: hessian(lambda x: net(x).sum())(X[:1]),
}
MORE: dict[str, dict[str, Any]] = {
    "": {},
    "checkpointed": {"activation_checkpointing": {"blocks": True}},
    "activations on the CPU": {"activation_checkpointing": {"cpu_checkpointing": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 64.0}},
}


def _trains(engine, rank):
    run_steps(engine, rank, range(2))
    return full_weights(engine)


@pytest.mark.turns
@pytest.mark.parametrize("stage", STAGES[:3])
@pytest.mark.parametrize("way", WAYS)
def test_a_transform_gives_what_it_gives_in_plain_torch(way, stage):
    want, trained = WAYS[way](stack(), stack()), by_hand(plain_sgd, [[(1.0, 0)], [(1.0, 0)]], 2)[0]

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage))
        net = engine if rank else model
        torch.testing.assert_close(WAYS[way](net, model), want)
        loss = squared(engine, At(0, 0, rank))
        # between a forward and its backward
        torch.testing.assert_close(WAYS[way](net, model), want)
        engine.backward(loss)
        engine.zero_grad()
        return _trains(engine, rank)

    for got in on_ranks(2, run):
        compare_tensors("weights trained after it", got, trained)


@pytest.mark.parametrize("way", ALONE)
def test_forward_mode(way):
    want = ALONE[way](stack(), stack())

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(1))
        torch.testing.assert_close(ALONE[way](engine, model), want)
        _trains(engine, rank)

    on_ranks(1, run)


AROUND = [
    (more, way)
    for more in MORE
    for way in ("grad of the input", "each sample")
    if (more, way) != ("fp16", "each sample")
]


@pytest.mark.parametrize(("more", "way"), AROUND)
def test_a_transform_of_a_model_with_more_around_its_blocks(more, way):
    want = WAYS[way](stack(), stack())

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(2, **MORE[more]))
        if more == "fp16":
            got = WAYS[way](lambda x: model(x.half()).float(), model)
            torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)
        else:
            torch.testing.assert_close(WAYS[way](engine, model), want)
            _trains(engine, rank)

    on_ranks(1, run)


def test_a_loss_over_a_gradient_trains_the_weights():
    """A penalty on the gradient of the output: the backward goes through what the transform has
    recorded.
    """

    def penalty(net):
        return grad(lambda x: net(x).pow(2).sum())(X).pow(2).mean()

    want = stack()
    penalty(want).backward()

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(1))
        engine.backward(penalty(engine))
        engine.step()
        weights = full_weights(engine)
        for name, p in want.named_parameters():
            moved = p.detach() - 0.05 * (p.grad if p.grad is not None else 0)
            torch.testing.assert_close(weights[name], moved, rtol=1e-5, atol=1e-6)

    on_ranks(2, run)


@pytest.mark.parametrize("way", ["grad of the input", "jacrev"])
def test_stage_3_refuses_a_transform_before_it_does_anything(way):
    trained = by_hand(plain_sgd, [[(1.0, 0)], [(1.0, 0)]], 2)[0]

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(3))
        with pytest.raises(
            PartitionError, match=r"torch\.func goes through \(root\).*\(stage 3\).*; use stage 2"
        ):
            WAYS[way](engine, model)
        engine.schedule.check_all_released()
        return _trains(engine, rank)

    for got in on_ranks(2, run):
        compare_tensors("weights trained after it", got, trained)


@pytest.mark.parametrize("stage", STAGES)
def test_vmap_alone_trains_at_every_stage(stage):
    want = stack()
    vmap(want)(X).pow(2).mean().backward()

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage))
        engine.backward(vmap(engine)(X).pow(2).mean())
        engine.step()
        for name, p in want.named_parameters():
            assert p.grad is not None
            torch.testing.assert_close(
                full_weights(engine)[name], p.detach() - 0.05 * p.grad, rtol=1e-5, atol=1e-6
            )

    on_ranks(2, run)


def _adapted(model, x):
    """The loss after one step of gradient descent, whose gradient counts as a constant: first-order
    MAML (arXiv:1703.03400).
    """
    weights = dict(model.named_parameters())
    inner = functional_call(model, weights, (x,)).pow(2).mean()
    grads = torch.autograd.grad(inner, list(weights.values()))
    fast = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), grads)}
    return functional_call(model, fast, (x,)).pow(2).mean()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_first_order_maml_trains_as_in_plain_torch(stage, accumulation):
    """A backward that brings no gradient to parameters shows nothing of those that do."""
    plain = stack()
    optimizer = plain_sgd(plain)
    windows = [
        [[floats(step, micro, rank, 3, 7) for rank in range(2)] for micro in range(accumulation)]
        for step in range(3)
    ]
    for window in windows:
        optimizer.zero_grad()
        for x in itertools.chain.from_iterable(window):
            (_adapted(plain, x) / 2 / accumulation).backward()
        optimizer.step()

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage, Plan(accumulation=accumulation)))
        for batch in itertools.chain.from_iterable(windows):
            engine.backward(_adapted(model, batch[rank]))
            engine.step()
        return full_weights(engine)

    want = {name: p.detach() for name, p in plain.named_parameters()}
    for weights in on_ranks(2, run):
        compare_tensors("weights", weights, want)
