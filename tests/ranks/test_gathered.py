"""GatheredParameters: whole values inside, written back from one rank, released after."""

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import PartitionError, RankMismatchError, ReleasedParameterError
from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.stacks import on_each_rank, on_ranks, run_steps, squared, stack
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


@on_each_rank(RANKS)
def test_values_without_storage_are_computed_inside(rank, model):
    """Under vmap, and sparse ones."""
    start(model, adamw(model), config_of(3))
    up, rows = model.blocks[1].up, torch.randn(3, model.blocks[1].up.in_features)
    with hf_zero.GatheredParameters(up.parameters()), torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(up)(rows), up(rows))
        assert torch.equal(up.weight.to_sparse().to_dense(), up.weight)


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


@in_turn("asked", ("weight", "both", "nothing"))
def test_a_write_to_another_parameter_of_the_unit_is_told(asked, heard):
    """One that is asked for is kept."""
    del heard[:]

    def run(rank, model):
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
        engine = start(model, plain_sgd(model), config_of(3, zero_optimization=zero))
        weight, bias = model.blocks[0].up.weight, model.blocks[0].up.bias
        given = [weight, bias] if asked == "both" else [weight]
        with hf_zero.GatheredParameters(given, modifier_rank=0), torch.no_grad():
            if rank == 0:
                weight.zero_()
                if asked != "nothing":
                    bias.fill_(1.0)
        kept = full_weights(engine)
        assert kept["blocks.0.up.weight"].eq(0).all()
        assert kept["blocks.0.up.bias"].eq(1).all() == (asked == "both")

    on_ranks(RANKS, run)
    told = [line for line in heard if "blocks.0.up.bias: written inside Gathered" in line]
    assert len(told) == (asked == "weight") and not any("up.weight" in line for line in told)


@in_turn("stage, precision", [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "fp32"), (3, "bf16")])
@on_each_rank(RANKS)
def test_without_a_modifier_equal_writes_are_kept(rank, model, stage, precision):
    plan = Plan(precision=precision)
    engine = start(model, plain_sgd(model), config_of(stage, plan))
    weight, bias = model.blocks[0].up.weight, model.blocks[0].up.bias
    with hf_zero.GatheredParameters([weight, bias], modifier_rank=None), torch.no_grad():
        weight.fill_(0.3)
        with hf_zero.GatheredParameters([bias]):  # the outer one looks
            bias.data = torch.ones_like(bias)
    kept = full_weights(engine)
    rounded = torch.tensor(0.3).to(weight.dtype).float()
    assert kept["blocks.0.up.weight"].eq(rounded).all() and kept["blocks.0.up.bias"].eq(1).all()
    run_steps(engine, rank, [0])


@in_turn("stage, writers", [(0, 2), (1, 2), (3, 2), (1, 1), (3, 1)])
def test_without_a_modifier_unequal_writes_are_refused(stage, writers):
    """On all ranks that have written."""

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage))
        weight = model.blocks[0].up.weight
        context = hf_zero.GatheredParameters([weight])
        context.__enter__()
        if rank >= writers:  # what it reads it may read alone
            context.__exit__(None, None, None)
            engine.destroy()
            return
        with torch.no_grad():
            weight.fill_(float(rank))
        with pytest.raises(RankMismatchError, match=r"blocks\.0\.up\.weight"):
            context.__exit__(None, None, None)

    on_ranks(RANKS, run)


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


def writes_to_its_weight(module, *_):
    with torch.no_grad():
        module.weight[0, 0] = 0.5


@on_each_rank(RANKS)
def test_a_context_that_cannot_begin_pins_nothing(rank, model):
    """A rounded weight has been written to in the forward: its gather is refused."""
    zero = {"stage": 3, "zero_quantized_weights": True, "stage3_param_persistence_threshold": 0}
    zero["stage3_module_granularity_threshold"] = 0
    engine = start(model, adamw(model), config_of(3, zero_optimization=zero))
    run_steps(engine, rank, [0, 1])
    hook = model.blocks[2].up.register_forward_hook(writes_to_its_weight)
    squared(engine, At(2, 0, rank))
    hook.remove()
    with (
        pytest.raises(PartitionError, match=r"up\.weight was written to in a forward") as refused,
        hf_zero.GatheredParameters(model.parameters()),
    ):
        pass
    assert not any(unit.guard.pins for unit in engine.units), refused
    assert_released(model.blocks[1].up.weight)
    run_steps(engine, rank, [3, 4])
    with hf_zero.GatheredParameters(model.blocks[2].up.weight):
        pass
    assert_released(model.blocks[2].up.weight)


@on_each_rank(RANKS)
def test_a_context_over_two_engines_one_of_which_refuses_it_pins_nothing(rank, model):
    other = stack()
    engine = start(model, adamw(model), config_of(3))
    early = {"stage": 3, "update_in_backward": True}
    second = start(other, adamw(other), config_of(3, zero_optimization=early))
    second.backward(squared(second, At(0, 0, rank)))
    with (
        pytest.raises(PartitionError, match="with a modifier_rank comes after") as refused,
        hf_zero.GatheredParameters([*model.parameters(), *other.parameters()], modifier_rank=0),
    ):
        pass
    assert not any(unit.guard.pins for each in (engine, second) for unit in each.units), refused
    assert_released(model.blocks[1].up.weight)
    second.step()
    for each in (engine, second):
        run_steps(each, rank, [1])


@in_turn("stage", (1, 3))
def test_writes_before_an_exception_are_named(stage, caplog):
    def run(rank, model):
        start(model, plain_sgd(model), config_of(stage))
        written, read = model.blocks[0].down.weight, model.blocks[1].down.weight
        with (
            pytest.raises(KeyError),
            torch.no_grad(),
            hf_zero.GatheredParameters([written, read], modifier_rank=0),
        ):
            if rank == 0:
                written.zero_()
            raise KeyError("user's own")

    caplog.clear()
    on_ranks(RANKS, run)
    lost = [r.getMessage() for r in caplog.records if "before an exception" in r.getMessage()]
    assert len(lost) == 1 and lost[0].startswith("blocks.0.down.weight: written inside")


@in_turn("stage", (1, 3))
def test_writes_back_that_an_exception_leaves_are_kept(stage, caplog):
    """As in plain torch: no rank needs a message of another one."""

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage))
        run_steps(engine, rank, [0])
        want = full_weights(engine)
        with (
            pytest.raises(KeyError),
            torch.no_grad(),
            hf_zero.summon_full_params(engine, writeback=True),
        ):
            model.blocks[0].down.weight.fill_(0.5)
            raise KeyError("user's own")
        want["blocks.0.down.weight"].fill_(0.5)
        oracle.compare_tensors("weights", full_weights(engine), want, 0.0, 0.0)

    caplog.clear()
    on_ranks(RANKS, run)
    assert not [r for r in caplog.records if "before an exception" in r.getMessage()]


class Hollow(nn.Module):
    def __init__(self):
        super().__init__()
        self.full = nn.Linear(4, 4)
        self.hollow = nn.ParameterList([torch.zeros(0, 3, dtype=torch.float64)])


def test_one_rank_reads_a_parameter_without_elements():
    """From what the other rank serves."""

    def run(rank, model):
        section = {"stage": 3, "stage3_param_persistence_threshold": 0}
        engine = start(model, plain_sgd(model), config_of(3, zero_optimization=section))
        (unit,) = {flat.unit for flat in engine.flats if "hollow.0" in flat.parameters}
        unit.gather_from({1 - rank: b"".join(bytes(4 * f.layout.shard_numel) for f in unit.flats)})
        assert model.hollow[0].shape == (0, 3)

    on_ranks(RANKS, run, build=Hollow)
