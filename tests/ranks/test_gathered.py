"""GatheredParameters: whole values inside, written back from one rank, released after."""

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import PartitionError, ReleasedParameterError
from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.stacks import on_each_rank, run_steps, squared, stack
from tests.helpers.training import At, Plan, adamw, plain_sgd
from tests.ranks.cases import trains_alike, values_of

RANKS = 2


def assert_released(weight):
    with pytest.raises(ReleasedParameterError):
        weight.sum()


@on_each_rank(RANKS)
def test_whole_inside_and_released_after(rank, model):
    engine, whole = start(model, adamw(model), config_of(3)), values_of(stack())
    named, weight = dict(model.named_parameters()), model.blocks[1].up.weight
    with hf_zero.GatheredParameters(named.values()):
        for name, p in named.items():
            assert torch.equal(p, whole[name]), name
    for asked in (weight, [None, weight, None]):
        with hf_zero.GatheredParameters(asked):
            with hf_zero.GatheredParameters(model.blocks[1].parameters()):
                pass
            assert torch.equal(weight, whole["blocks.1.up.weight"])  # until the last exit
        assert_released(weight)
    with hf_zero.GatheredParameters(weight, enabled=False):
        assert_released(weight)
    with (
        pytest.raises(KeyError),
        hf_zero.GatheredParameters(list(model.parameters()), modifier_rank=0),
    ):
        raise KeyError("user's own")
    assert_released(weight)
    run_steps(engine, rank, [0])


@in_turn("stage", (0, 3))
@on_each_rank(RANKS)
def test_what_is_not_written_keeps_its_master(rank, model, stage):
    """Not what it was rounded to for the script."""
    engine = start(model, plain_sgd(model), config_of(stage, Plan(precision="bf16")))
    run_steps(engine, rank, [0])
    before = full_weights(engine)
    weight = model.blocks[0].down.weight
    with hf_zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight[0, 0] = 0.5
    before["blocks.0.down.weight"][0, 0] = 0.5
    oracle.compare_tensors("masters", full_weights(engine), before, 0.0, 0.0)
    assert any(not torch.equal(each, each.bfloat16().float()) for each in before.values())


@in_turn("summoned, stage", [(False, 3), (True, 1), (True, 3)])
def test_forwards_and_training_inside(summoned, stage):
    """TRL generates inside, as often as each rank likes: nothing is gathered, so nobody waits."""

    def trains(net, at):
        loss = squared(net, at)
        net.backward(loss)
        return loss

    def gathered(engine):
        if summoned:
            return hf_zero.summon_full_params(engine)
        return hf_zero.GatheredParameters(list(engine.module.parameters()))

    def micro(net, at):
        if not hasattr(net, "engine"):
            return trains(net, at)
        stats = net.engine.mesh.stats
        with gathered(net.engine):
            before = dict(stats.counts)
            with torch.no_grad():
                for turn in range(1 + 2 * at.rank):
                    squared(net if turn % 2 else net.module, At(5, 0, at.rank))
            assert dict(stats.counts) == before
            if at.step == 0 and not summoned:
                return trains(net, at)
        return trains(net, at)

    trains_alike(micro, stage, Plan(RANKS, 2))


@on_each_rank(RANKS)
def test_plain_parameters_are_broadcast(rank, model):
    """transformers gathers lists in which some parameters belong to no engine."""
    plain = nn.Parameter(torch.full((3,), float(rank)))
    with hf_zero.GatheredParameters([plain], modifier_rank=1):
        if rank == 1:
            plain.data.fill_(7.0)
    assert plain.tolist() == [7.0] * 3
    with hf_zero.GatheredParameters([plain]):
        assert plain.tolist() == [7.0] * 3


@on_each_rank(RANKS)
def test_the_engine_of_released_parameters_is_gone(rank, model):
    start(model, adamw(model), config_of(3)).destroy()
    with (
        pytest.raises(PartitionError, match=r"the engine of .* was destroyed"),
        hf_zero.GatheredParameters(model.parameters()),
    ):
        pass
