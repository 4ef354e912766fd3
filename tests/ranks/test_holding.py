"""Models that are sharded before their training is configured: read, frozen, copied, destroyed,
taken over.
"""

import copy

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.errors import PartitionError, ReleasedParameterError
from hf_zero.loading.shard_only import hold
from hf_zero.zero.layout.initial_values import pending
from hf_zero.zero.layout.parameter import ReleasedParameter
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, run_steps, squared, stack
from tests.helpers.training import At, plain_sgd, trainable
from tests.ranks.cases import expect, values_of

RANKS = 2


@torch.no_grad()
def answer(net, rank):
    return squared(net, At(0, 0, rank))


@in_turn("stage, bf16", [(1, True), (3, False)])
def test_a_held_model_keeps_its_dtype_and_is_taken_over(stage, bf16):
    """In 16 bits nothing of its fp32 values is lost."""

    def run(rank, model):
        held = hold(model, ZeroConfig(stage=stage), stage)
        assert (held.stage, {p.dtype for p in model.parameters()}) == (stage, {torch.float32})
        assert {type(p) is ReleasedParameter for p in model.parameters()} == {stage == 3}
        assert torch.equal(answer(held, rank), answer(stack(), rank))
        engine = start(model, plain_sgd(model), config_of(stage, bf16={"enabled": bf16}))
        for flat in held.flats:
            assert not any(flat.shard_bytes().values()) and not flat.views, "its memory is kept"
        assert held.mesh.shard._group is None, "its process groups are left behind"
        run_steps(engine, rank, range(0 if bf16 else 2))
        return full_weights(engine)

    want = values_of(stack()) if bf16 else by_hand(plain_sgd, [[(1.0, 0)]] * 2, RANKS)[0]
    expect(want, run, **({"tolerance": 0.0, "floor": 0.0} if bf16 else {}))


@in_turn("serving, training", [(3, 3), (0, 3)])
def test_a_model_that_has_served_is_trained(serving, training):
    """Another engine takes it over, and the first, without an optimizer, still answers."""

    def run(rank, model):
        served = start(model, None, config_of(serving))
        optimizer, before = plain_sgd(model), answer(served, rank)
        engine = start(model, optimizer, config_of(training))
        assert torch.equal(answer(served, rank), before)
        run_steps(engine, rank, range(2))
        assert torch.equal(answer(served, rank), answer(engine, rank))
        for flat in served.flats:
            kept = flat.full.untyped_storage().nbytes() + sum(flat.shard_bytes().values())
            assert not kept, "its memory is kept"
        return full_weights(engine)

    expect(by_hand(plain_sgd, [[(1.0, 0)]] * 2, RANKS)[0], run)


@on_each_rank(RANKS)
def test_a_rank_that_still_looks_at_a_weight_hangs_nobody(rank, model):
    """Gathered values or views on one rank must not change what all ranks do together."""
    want = values_of(model)
    hold(model, ZeroConfig(stage=3))
    with hf_zero.GatheredParameters(model.head.weight):
        kept = model.head.weight.detach() if rank == 0 else want["head.weight"]
    engine = start(model, plain_sgd(model), config_of(3))
    assert torch.equal(kept, want["head.weight"]), "the view lost its memory"
    assert all(torch.equal(value, want[name]) for name, value in full_weights(engine).items())


@on_each_rank(RANKS)
def test_it_may_be_frozen_copied_and_read_before_it_is_trained(rank, model):
    plain = values_of(model)
    hold(model, ZeroConfig(stage=3))
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    whole = copy.deepcopy(model.head)  # as adapters do with modules that are saved whole
    assert {type(p) for p in whole.parameters()} == {nn.Parameter}
    assert torch.equal(whole.weight, plain["head.weight"])
    norm = float(model.blocks[0].up.weight.norm())
    assert norm == pytest.approx(float(plain["blocks.0.up.weight"].norm()))
    with pytest.raises(ReleasedParameterError, match=r"blocks\.2\.up\.weight"), torch.no_grad():
        model.blocks[2].up.weight.zero_()
    model.extra = whole
    engine = start(model, torch.optim.SGD(trainable(model), lr=0.1), config_of(3))
    trained = {name for flat in engine.flats if flat.trainable for name in flat.parameters}
    assert trained == {"head.weight", "head.bias", "extra.weight", "extra.bias"}


class Counted:
    """A source of elements that knows how many were read."""

    def __init__(self, values, sliceable):
        self.values, self.sliceable, self.dtype = values, sliceable, values.dtype
        self.read_elements = 0

    def read(self, start, out):
        self.read_elements += out.numel()
        out.copy_(self.values.reshape(-1)[start : start + out.numel()])

    def whole(self):
        self.read_elements += self.values.numel()
        return self.values.clone()


@in_turn("sliceable, dtype", [(True, torch.float32), (False, torch.bfloat16)])
def test_each_rank_reads_its_own_elements_of_pending_parameters(sliceable, dtype):
    sources: list[list[Counted]] = [[] for _ in range(4)]
    plain = stack().to(dtype).state_dict()

    def run(rank, model):
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                source = Counted(parameter.detach().to(dtype), sliceable)
                sources[rank].append(source)
                module._parameters[name] = pending(parameter.shape, source)
        hold(model, ZeroConfig(stage=3))
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert all(torch.equal(value, plain[name]) for name, value in model.state_dict().items())

    on_ranks(4, run)
    read = [sum(source.read_elements for source in mine) for mine in sources]
    total = sum(value.numel() for value in plain.values())
    assert sum(read) == total, "something is read twice"
    assert max(read) < 0.3 * total if sliceable else read == [total, 0, 0, 0]


@on_each_rank(RANKS)
def test_data_of_another_shape_is_told(rank, model):
    hold(model, ZeroConfig(stage=3))
    with (
        pytest.raises(PartitionError, match=r"head\.weight of shape \(5, 32\)"),
        hf_zero.GatheredParameters(model.head.weight),
    ):
        model.head.weight.data = torch.zeros(7, 32)
    assert model.head.weight.shape == (5, 32) and type(model.head.weight) is ReleasedParameter
