"""requires_grad that changes after initialize: for a while it may, as where adapters are off for
a reference; a backward refuses.
"""

from __future__ import annotations

import pytest
import torch

from hf_zero.errors import PartitionError
from tests.helpers import oracle
from tests.helpers.engines import STAGES, config_of, full_weights, start
from tests.helpers.stacks import by_hand, on_ranks, squared, stack
from tests.helpers.training import At, adamw, plain_sgd

RANKS = 2
NAME = r"blocks\.0\.up\.weight"


def partly_frozen():
    model = stack()
    model.blocks[1].requires_grad_(False)
    return model


@pytest.mark.parametrize("stage", STAGES)
def test_off_for_a_reference_and_on_again(stage):
    """The trained are off and the frozen are on while a forward without gradients runs; training
    goes on as if nothing had been.
    """
    want, _ = by_hand(plain_sgd, [[(1.0, 0)]] * 3, RANKS, build=partly_frozen)

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage))
        trains = [(p, p.requires_grad) for p in model.parameters()]
        for step in range(3):
            loss = squared(engine, At(step, 0, rank))
            for parameter, flag in trains:
                parameter.requires_grad = not flag
            assert all(parameter.requires_grad is not flag for parameter, flag in trains)
            with torch.no_grad():
                assert torch.equal(squared(engine, At(step, 0, rank)), loss)
            for parameter, flag in trains:
                parameter.requires_grad_(flag)
            engine.backward(loss)
            engine.step()
        return full_weights(engine)

    for weights in on_ranks(RANKS, run, build=partly_frozen):
        oracle.compare_tensors("weights", weights, want)


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_refuses_what_is_still_switched(stage, on):
    def build():
        model = stack()
        model.blocks[0].up.weight.requires_grad_(not on)
        return model

    want, _ = by_hand(plain_sgd, [[(1.0, 0)]], RANKS, build=build)

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage))
        weight = model.blocks[0].up.weight
        weight.requires_grad_(on)
        with pytest.raises(
            PartitionError,
            match=rf"requires_grad of {NAME} is {on} in this backward and was {not on}.*destroy",
        ):
            engine.backward(squared(engine, At(0, 0, rank)))
        with pytest.raises(PartitionError, match=NAME):
            squared(engine, At(0, 0, rank)).backward()
        weight.requires_grad_(not on)
        engine.backward(squared(engine, At(0, 0, rank)))
        engine.step()
        return full_weights(engine)

    for weights in on_ranks(RANKS, run, build=build):
        oracle.compare_tensors("weights", weights, want)


@pytest.mark.parametrize("stage", STAGES)
def test_it_may_change_between_engines(stage):
    """What the error tells users to do."""

    def run(rank, model):
        start(model, adamw(model), config_of(stage)).destroy()
        model.requires_grad_(False)
        model.head.requires_grad_(True)
        engine = start(model, plain_sgd(model.head), config_of(stage))
        engine.backward(squared(engine, At(0, 0, rank)))
        engine.step()
        assert {name for flat in engine.flats if flat.trainable for name in flat.parameters} == {
            "head.weight",
            "head.bias",
        }

    on_ranks(RANKS, run)
