"""Models that are sharded before their training is configured: read, frozen, copied, destroyed,
taken over.
"""

import copy
import gc

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.distributed import process_group
from hf_zero.errors import PartitionError, ReleasedParameterError
from hf_zero.loading.shard_only import hold
from hf_zero.zero.layout.initial_values import pending
from hf_zero.zero.layout.parameter import ReleasedParameter
from tests.helpers import oracle
from tests.helpers.engines import STAGES, config_of, full_weights, start
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, run_steps, squared, stack
from tests.helpers.training import At, plain_sgd

RANKS = 2


def held(model):
    hold(model, ZeroConfig(stage=3))
    assert {type(p) for p in model.parameters()} == {ReleasedParameter}
    return model


@pytest.mark.parametrize("stage", STAGES)
def test_initialize_takes_a_held_model_over(stage):
    want, _ = by_hand(plain_sgd, [[(1.0, 0)]] * 2, RANKS)

    def run(rank, model):
        held(model)
        with torch.no_grad():
            before = squared(model, At(0, 0, rank))
        assert torch.equal(before, squared(stack(), At(0, 0, rank)))
        engine = start(model, plain_sgd(model), config_of(stage))
        run_steps(engine, rank, range(2))
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want)


@pytest.mark.parametrize("stage", STAGES)
def test_a_held_model_of_any_stage_keeps_its_dtype_and_is_taken_over(stage):
    """A model that is evaluated before its training: in 16 bits nothing of its fp32 values may
    be lost.
    """
    want = {name: p.detach().clone() for name, p in stack().named_parameters()}

    def run(rank, model):
        engine = hold(model, ZeroConfig(stage=stage), stage)
        assert (engine.stage, {p.dtype for p in model.parameters()}) == (stage, {torch.float32})
        assert {type(p) is ReleasedParameter for p in model.parameters()} == {stage == 3}
        with torch.no_grad():
            assert torch.equal(squared(engine, At(0, 0, rank)), squared(stack(), At(0, 0, rank)))
        trained = start(model, plain_sgd(model), config_of(stage, bf16={"enabled": True}))
        return full_weights(trained)

    for weights in on_ranks(RANKS, run):
        assert all(torch.equal(weights[name], value) for name, value in want.items())


@pytest.mark.parametrize("serving, training", [(3, 3), (0, 2), (3, 1), (0, 3)])
def test_a_model_that_has_served_is_trained(serving, training):
    """Without an optimizer an engine computes, a reference say; the next one takes the model
    over, and the first still answers.
    """
    want, _ = by_hand(plain_sgd, [[(1.0, 0)]] * 2, RANKS)

    def run(rank, model):
        served = start(model, None, config_of(serving))
        optimizer = plain_sgd(model)
        with torch.no_grad():
            before = squared(served, At(0, 0, rank))
        engine = start(model, optimizer, config_of(training))
        with torch.no_grad():
            assert torch.equal(squared(served, At(0, 0, rank)), before)
        run_steps(engine, rank, range(2))
        with torch.no_grad():
            assert torch.equal(squared(served, At(0, 0, rank)), squared(engine, At(0, 0, rank)))
        assert all(
            flat.full.untyped_storage().nbytes() == 0 and not any(flat.shard_bytes().values())
            for flat in served.flats
        ), "its memory is kept"
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want)


def test_a_rank_that_still_looks_at_a_weight_hangs_nobody():
    """Gathered values or views on one rank must not change what all ranks do together."""
    want = {name: p.detach() for name, p in stack().named_parameters()}

    def run(rank, model):
        held(model)
        with hf_zero.GatheredParameters(model.head.weight):
            kept = model.head.weight.detach() if rank == 0 else None
        engine = start(model, plain_sgd(model), config_of(3))
        if kept is not None:
            assert torch.equal(kept, want["head.weight"]), "the view lost its memory"
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        assert all(torch.equal(weights[name], value) for name, value in want.items())


@on_each_rank(RANKS)
def test_it_may_be_frozen_copied_and_read_before_it_is_trained(rank, model):
    held(model)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    whole = copy.deepcopy(model.head)  # as adapters do with modules that are saved whole
    assert {type(p) for p in whole.parameters()} == {nn.Parameter} and torch.equal(
        whole.weight, stack().head.weight
    )
    assert float(model.blocks[0].up.weight.norm()) == pytest.approx(
        float(stack().blocks[0].up.weight.norm())
    )
    with (
        pytest.raises(ReleasedParameterError, match=r"zero_ on blocks\.2\.up\.weight"),
        torch.no_grad(),
    ):
        model.blocks[2].up.weight.zero_()
    model.extra = whole
    engine = start(
        model,
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        config_of(3),
    )
    trained = {name for flat in engine.flats if flat.trainable for name in flat.parameters}
    assert trained == {"head.weight", "head.bias", "extra.weight", "extra.bias"}


@on_each_rank(RANKS)
def test_the_memory_of_a_holder_is_given_back(rank, model):
    holder = hold(model, ZeroConfig(stage=3))
    assert all(flat.shard_bytes()["device"] for flat in holder.flats)
    start(model, plain_sgd(model), config_of(3))
    assert all(not any(flat.shard_bytes().values()) and not flat.views for flat in holder.flats)
    assert holder.mesh.shard._group is None, "its process groups are left behind"


class Counted:
    """A source of elements that knows how many were read."""

    def __init__(self, values, sliceable):
        self.values, self.sliceable, self.dtype, self.read_elements = (
            values,
            sliceable,
            values.dtype,
            0,
        )

    def read(self, start, out):
        self.read_elements += out.numel()
        out.copy_(self.values.reshape(-1)[start : start + out.numel()])

    def whole(self):
        self.read_elements += self.values.numel()
        return self.values.clone()


@pytest.mark.parametrize("sliceable", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_rank_reads_its_own_elements_of_pending_parameters(sliceable, dtype):
    sources = [{} for _ in range(4)]

    def run(rank, model):
        for prefix, module in model.named_modules():
            for name, parameter in list(module._parameters.items()):
                source = sources[rank][f"{prefix}.{name}"] = Counted(
                    parameter.detach().to(dtype), sliceable
                )
                module._parameters[name] = pending(parameter.shape, source)
        held(model)
        assert {p.dtype for p in model.parameters()} == {dtype}
        return {name: value.clone() for name, value in model.state_dict().items()}

    for state in on_ranks(4, run):
        assert all(
            torch.equal(value, state[name].to(dtype))
            for name, value in stack().to(dtype).state_dict().items()
        )
    read = [sum(source.read_elements for source in mine.values()) for mine in sources]
    total = sum(p.numel() for p in stack().parameters())
    assert sum(read) == total, "something is read twice"
    assert max(read) < 0.3 * total if sliceable else read == [total, 0, 0, 0]


def test_data_of_another_shape_is_told():
    def run(rank, model):
        held(model)
        with (
            pytest.raises(
                PartitionError,
                match=r"head\.weight of shape \(5, 32\) was given data of shape \(7, "
                r"32\).*put a new nn\.Parameter",
            ),
            hf_zero.GatheredParameters(model.head.weight),
        ):
            model.head.weight.data = torch.zeros(7, 32)
        assert model.head.weight.shape == (5, 32) and type(model.head.weight) is ReleasedParameter
        gc.collect()
        assert process_group.get_world_size() == RANKS

    on_ranks(RANKS, run)
