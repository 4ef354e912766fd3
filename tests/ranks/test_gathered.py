"""GatheredParameters: whole values inside, written back from one rank, released after."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import ReleasedParameterError
from tests.helpers import oracle
from tests.helpers.engines import STAGES, config_of, full_weights, start
from tests.helpers.models import ARCHITECTURES
from tests.helpers.stacks import by_hand, on_ranks, squared, stack
from tests.helpers.training import At, Plan, adamw, plain_sgd

RANKS = 2


def whole() -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in stack().named_parameters()}


@pytest.mark.parametrize("stage", STAGES)
def test_whole_inside_and_released_after(stage):
    def run(rank, model):
        start(model, adamw(model), config_of(stage))
        named = dict(model.named_parameters())
        with hf_zero.GatheredParameters(named.values()):
            for name, p in named.items():
                assert torch.equal(p, whole()[name]), name
        weight = model.blocks[1].up.weight
        with hf_zero.GatheredParameters(weight):
            assert torch.equal(weight, whole()["blocks.1.up.weight"])
        with hf_zero.GatheredParameters([None, weight, None]):
            assert weight.abs().sum() > 0
        if stage == 3:
            with pytest.raises(ReleasedParameterError, match=r"blocks\.1\.up\.weight"):
                weight.sum()
            assert weight.ds_status == type(weight).ds_status
        else:
            assert torch.equal(weight, whole()["blocks.1.up.weight"])

    on_ranks(RANKS, run)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("writer", [0, 1])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_one_rank_writes_reaches_all_and_the_master(stage, writer, precision):
    def change(model):
        with torch.no_grad():
            model.blocks[0].down.weight.mul_(0.5)
            model.head.bias.fill_(0.25)

    def changed():
        model = stack()
        change(model)
        return model

    want, _ = by_hand(plain_sgd, [[(1.0, 0)]], RANKS, build=changed)

    def run(rank, model):
        plan = Plan(precision=precision)
        engine = start(model, plain_sgd(model), config_of(stage, plan))
        with hf_zero.GatheredParameters([model.blocks[0].down.weight, model.head.bias], modifier_rank=writer):
            if rank == writer:
                change(model)
        engine.backward(squared(engine, At(0, 0, rank), plan.dtype))
        engine.step()
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want, tolerance=1e-5 if precision == "fp32" else 1e-2)


@pytest.mark.parametrize("stage", STAGES)
def test_nested_contexts_release_at_the_last_exit(stage):
    def run(rank, model):
        start(model, adamw(model), config_of(stage))
        weight = model.blocks[0].up.weight
        with hf_zero.GatheredParameters([weight]):
            with hf_zero.GatheredParameters(model.blocks[0].parameters()):
                pass
            assert torch.equal(weight, whole()["blocks.0.up.weight"])
        if stage == 3:
            with pytest.raises(ReleasedParameterError):
                weight.sum()

    on_ranks(RANKS, run)


@pytest.mark.parametrize("stage", STAGES)
def test_forwards_and_training_inside(stage):
    """TRL generates inside; the parameters stay whole until the exit, and the training after it is right."""
    want, _ = by_hand(plain_sgd, [[(1.0, 0)]] * 2, RANKS)

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage))
        with hf_zero.GatheredParameters(list(model.parameters())):
            with torch.no_grad():
                squared(model, At(5, 0, rank))
            assert torch.equal(model.head.weight, whole()["head.weight"])
            engine.backward(squared(engine, At(0, 0, rank)))
            engine.step()
        engine.backward(squared(engine, At(1, 0, rank)))
        engine.step()
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want)


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_inside_leaves_it_released(stage):
    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage))
        with pytest.raises(KeyError), hf_zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            raise KeyError("user's own")
        if stage == 3:
            with pytest.raises(ReleasedParameterError):
                model.head.weight.sum()
        engine.backward(squared(engine, At(0, 0, rank)))
        engine.step()

    on_ranks(RANKS, run)


def test_plain_parameters_are_broadcast():
    """transformers gathers lists in which some parameters belong to no engine."""

    def run(rank, model):
        plain = nn.Parameter(torch.full((3,), float(rank)))
        with hf_zero.GatheredParameters([plain], modifier_rank=1):
            if rank == 1:
                plain.data.fill_(7.0)
        assert plain.tolist() == [7.0] * 3
        with hf_zero.GatheredParameters([plain]):
            assert plain.tolist() == [7.0] * 3

    on_ranks(RANKS, run)


def test_disabled_does_nothing():
    def run(rank, model):
        start(model, adamw(model), config_of(3))
        with hf_zero.GatheredParameters(list(model.parameters()), enabled=False), pytest.raises(ReleasedParameterError):
            model.head.weight.sum()

    on_ranks(RANKS, run)


def test_stage_3_parameters_answer_as_deepspeeds_do():
    def run(rank, model):
        start(model, adamw(model), config_of(3))
        ids = [p.ds_id for p in model.parameters()]
        assert len(set(ids)) == len(ids)
        own = 0
        for name, p in model.named_parameters():
            assert p.ds_shape == whole()[name].shape and p.ds_numel == whole()[name].numel()
            assert p.ds_status.name == "NOT_AVAILABLE"
            assert p.partition_numel() == p.ds_tensor.numel()
            own += p.ds_tensor.numel()
        with hf_zero.GatheredParameters(list(model.parameters())):
            assert {p.ds_status.name for p in model.parameters()} == {"AVAILABLE"}
        return own

    assert sum(on_ranks(RANKS, run)) == sum(p.numel() for p in stack().parameters())


def test_generation_inside_a_context():
    prompt = torch.tensor([[5, 6, 7]])
    want = ARCHITECTURES["gpt2"].build().eval().generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)

    def run(rank, model):
        engine = start(model, adamw(model), config_of(3))
        with hf_zero.GatheredParameters(list(model.parameters())):
            model.eval()
            made = engine.module.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
        assert torch.equal(made, want)

    on_ranks(RANKS, run, build=ARCHITECTURES["gpt2"].build)
