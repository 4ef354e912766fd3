"""requires_grad that changes after initialize: for a while it may, as where adapters are off for
a reference, or layers frozen for some steps; a backward refuses what was frozen at initialize.
"""

from __future__ import annotations

import pytest
import torch

from hf_zero.errors import PartitionError
from tests.helpers import oracle
from tests.helpers.engines import STAGES, config_of, full_weights, start
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, squared, stack
from tests.helpers.training import At, adamw, plain_sgd

RANKS = 2


def partly_frozen():
    model = stack()
    model.blocks[1].requires_grad_(False)
    return model


@pytest.mark.parametrize("stage", STAGES)
def test_off_for_a_reference_and_on_again(stage):
    """During a forward without gradients the trained parameters are off and the frozen ones on;
    training continues unaffected.
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


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_refuses_what_was_frozen_at_initialize(stage):
    want, _ = by_hand(plain_sgd, [[(1.0, 0)]], RANKS, build=partly_frozen)
    name = r"blocks\.1\.\w+\.\w+"

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage))
        model.blocks[1].requires_grad_(True)
        with pytest.raises(
            PartitionError,
            match=rf"requires_grad of {name} is True in this backward and was False.*destroy",
        ):
            engine.backward(squared(engine, At(0, 0, rank)))
        with pytest.raises(PartitionError, match=name):
            squared(engine, At(0, 0, rank)).backward()
        model.blocks[1].requires_grad_(False)
        engine.backward(squared(engine, At(0, 0, rank)))
        engine.step()
        return full_weights(engine)

    for weights in on_ranks(RANKS, run, build=partly_frozen):
        oracle.compare_tensors("weights", weights, want)


def every_other(model, at):
    """Other halves of the parameters in turn, from one micro-batch to the next."""
    for index, p in enumerate(model.parameters()):
        p.requires_grad_((index + at.micro) % 2 == 0)


def a_block(model, at):
    """All of it in the first steps, then one block less, whose optimizer state waits."""
    model.blocks[1].requires_grad_(at.step not in (1, 2))


def all_but_the_head(model, at):
    """No block has a backward in the first step."""
    model.requires_grad_(at.step > 0)
    model.head.requires_grad_(True)


@pytest.mark.turns
@pytest.mark.parametrize("freeze", [every_other, a_block, all_but_the_head])
@pytest.mark.parametrize("stage", STAGES)
def test_what_trains_may_be_frozen_for_a_while(stage, freeze):
    plain = stack()
    optimizer = adamw(plain)
    for step in range(4):
        for micro in range(2):
            freeze(plain, At(step, micro, 0))
            for rank in range(RANKS):
                (squared(plain, At(step, micro, rank)) / (RANKS * 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    want = {name: p.detach() for name, p in plain.named_parameters()}

    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage, gradient_accumulation_steps=2))
        for step in range(4):
            for micro in range(2):
                freeze(model, At(step, micro, rank))
                engine.backward(squared(engine, At(step, micro, rank)))
                engine.step()
        model.requires_grad_(True)
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want)


@pytest.mark.parametrize("stage", STAGES)
@on_each_rank(RANKS)
def test_it_may_change_between_engines(rank, model, stage):
    """This is the remedy that the error names."""
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
