"""safe_get_full_* and safe_set_full_*: whole fp32 values of one parameter, read and written on
every rank.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import PartitionError
from tests.helpers import oracle
from tests.helpers.engines import STAGES, config_of, full_weights, start
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, squared, stack
from tests.helpers.training import At, Plan, adamw, plain_sgd

RANKS = 2


@pytest.mark.parametrize("stage", STAGES)
def test_masters_are_read_in_fp32_where_the_model_is_bf16(stage):
    plain = {name: p.detach() for name, p in stack().named_parameters()}

    def run(rank, model):
        start(model, adamw(model), config_of(stage, Plan(precision="bf16")))
        for name, p in model.named_parameters():
            assert p.dtype == torch.bfloat16
            value = hf_zero.safe_get_full_fp32_param(p)
            assert value.dtype == torch.float32 and torch.equal(value, plain[name]), name

    on_ranks(RANKS, run)


@pytest.mark.parametrize("stage", STAGES)
def test_a_value_that_is_set_is_trained_on(stage):
    def changed():
        model = stack()
        with torch.no_grad():
            model.blocks[1].up.weight.mul_(0.5)
        return model

    want, _ = by_hand(plain_sgd, [[(1.0, 0)]], RANKS, build=changed)

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage))
        weight = model.blocks[1].up.weight
        value = hf_zero.safe_get_full_fp32_param(weight) * 0.5
        hf_zero.safe_set_full_fp32_param(weight, value)
        assert torch.equal(hf_zero.safe_get_full_fp32_param(weight), value)
        engine.backward(squared(engine, At(0, 0, rank)))
        engine.step()
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want)


@pytest.mark.parametrize("stage", STAGES)
def test_optimizer_state_is_read_and_set(stage):
    model, gradients = stack(), {}
    for rank in range(RANKS):
        (squared(model, At(0, 0, rank)) / RANKS).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}

    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage))
        engine.backward(squared(engine, At(0, 0, rank)))
        engine.step()
        named = dict(model.named_parameters())
        first = {
            name: hf_zero.safe_get_full_optimizer_state(p, "exp_avg") for name, p in named.items()
        }
        second = {
            name: hf_zero.safe_get_full_optimizer_state(p, "exp_avg_sq")
            for name, p in named.items()
        }
        oracle.compare_tensors(
            "first moment", first, {name: 0.1 * g for name, g in gradients.items()}
        )
        oracle.compare_tensors(
            "second moment", second, {name: 0.001 * g.square() for name, g in gradients.items()}
        )
        p = named["blocks.2.down.weight"]
        hf_zero.safe_set_full_optimizer_state(p, torch.full(p.shape, 0.5), "exp_avg")
        assert torch.equal(
            hf_zero.safe_get_full_optimizer_state(p, "exp_avg"), torch.full(p.shape, 0.5)
        )
        assert torch.equal(
            hf_zero.safe_get_full_optimizer_state(named["head.weight"], "exp_avg"),
            first["head.weight"],
        )

    on_ranks(RANKS, run)


@pytest.mark.parametrize("stage", STAGES)
@on_each_rank(RANKS)
def test_a_gradient_set_before_the_backward_would_be_lost(rank, model, stage):
    engine = start(model, plain_sgd(model), config_of(stage))
    for _ in range(2):
        with pytest.raises(
            PartitionError, match=r"head\.weight has no gradient yet.*between backward and step"
        ):
            hf_zero.safe_set_full_grad(model.head.weight, torch.ones(5, 32))
        engine.backward(squared(engine, At(0, 0, rank)))
        engine.step()


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_set_is_stepped_with(stage):
    want = {name: p.detach().clone() for name, p in stack().named_parameters()}
    for value in want.values():
        value -= 0.05 * 0.5

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage))
        engine.backward(squared(engine, At(0, 0, rank)))
        for p in model.parameters():
            hf_zero.safe_set_full_grad(p, torch.full(p.shape, 0.5))
            assert torch.equal(hf_zero.safe_get_full_grad(p), torch.full(p.shape, 0.5))
        engine.step()
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_gradients_are_given_unscaled(stage, precision):
    model = stack()
    for rank in range(RANKS):
        (squared(model, At(0, 0, rank)) / RANKS).backward()
    want = {name: p.grad.norm().item() for name, p in model.named_parameters()}

    def run(rank, model):
        plan = Plan(precision=precision, scale=4096.0)
        engine = start(model, plain_sgd(model), config_of(stage, plan))
        engine.backward(squared(engine, At(0, 0, rank), plan.dtype))
        return {
            name: hf_zero.safe_get_full_grad(p).norm().item()
            for name, p in model.named_parameters()
        }

    for found in on_ranks(RANKS, run):
        assert found == pytest.approx(want, rel=0.05, abs=1e-4)


def test_parameters_that_no_engine_owns():
    p = nn.Parameter(torch.arange(3.0))
    assert hf_zero.safe_get_full_fp32_param(p).tolist() == [0, 1, 2]
    assert hf_zero.safe_get_full_grad(p) is None
    p.grad = torch.ones(3)
    assert hf_zero.safe_get_full_grad(p).tolist() == [1, 1, 1]
    hf_zero.safe_set_full_fp32_param(p, torch.zeros(3))
    assert p.tolist() == [0, 0, 0]
