"""Hooks before the optimizer's step that write to parameters of the model: the update starts from
what they have written, wherever the master weights are.
"""

from __future__ import annotations

import pytest
import torch

import hf_zero
from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import features
from tests.helpers.offloads import offload
from tests.helpers.stacks import by_hand, on_ranks, run_steps, stack
from tests.helpers.training import adamw

RANKS = 2
STEPS = 3
PRECISIONS = {
    "masters in fp32": {"enabled": True},
    "masters in bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
}


def halves(model, gather=False):
    parameters = [*model.parameters()]
    if gather:
        with hf_zero.GatheredParameters(parameters, modifier_rank=0):
            halves(model)
        return
    torch._foreach_mul_(parameters[:2], 0.5)
    for parameter in parameters[2:]:
        parameter.data.mul_(0.5)


@in_turn(
    "stage, way, in_backward",
    [
        (0, "device", False),
        (1, "optimizer on cpu", False),
        (2, "half on cpu", False),
        (2, "optimizer in files", False),
        (1, "device", True),
        (2, "half on cpu", True),
    ],
)
def test_writes_to_the_model_act_on_this_step(stage, way, in_backward, tmp_path):
    def plain(model):
        optimizer = adamw(model)
        optimizer.register_step_pre_hook(torch.no_grad()(lambda *_: halves(model)))
        return optimizer

    want, _ = by_hand(plain, [[(1.0, 0)]] * STEPS, RANKS)

    def run(rank, model):
        optimizer = adamw(model)
        section = {**offload(way, stage, tmp_path), "update_in_backward": in_backward}
        engine = start(model, optimizer, config_of(stage, zero_optimization=section))
        optimizer.register_step_pre_hook(torch.no_grad()(lambda *_: halves(model)))
        run_steps(engine, rank, range(STEPS))
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want, floor=oracle.ADAM_ROUNDING)


@in_turn("stage, gather", [(0, False), (1, False), (2, True), (3, True)])
@pytest.mark.parametrize("masters", PRECISIONS)
def test_writes_reach_master_weights_in_16_bits(masters, stage, gather):
    """Exact halves: without a learning rate a step changes nothing else."""

    def run(rank, model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        engine = start(model, optimizer, config_of(stage, bf16=PRECISIONS[masters]))
        before = full_weights(engine)
        optimizer.register_step_pre_hook(torch.no_grad()(lambda *_: halves(model, gather)))
        run_steps(engine, rank, range(1))
        for name, weights in full_weights(engine).items():
            assert torch.equal(weights, before[name].bfloat16().to(weights.dtype) / 2)

    on_ranks(RANKS, run)


@in_turn("stage", [1, 2, 3])
def test_writes_to_members_without_a_gradient_reach_all_ranks(stage):
    """The backward of each step has the gradients of one weight alone."""

    def decay(optimizer, *_):
        for group in optimizer.param_groups:
            torch._foreach_mul_([*group["params"]], 0.9)

    def losses(model, step_of):
        model_losses = []
        optimizer, step, module = step_of(model)
        optimizer.register_step_pre_hook(torch.no_grad()(decay))
        for number in range(STEPS):
            loss = module(features(number, 0, 0)).pow(2).mean()
            loss.backward(inputs=[model.head.weight])
            step()
            optimizer.zero_grad()
            model_losses.append(loss.item())
        return model_losses

    def plain(model):
        optimizer = adamw(model)
        return optimizer, optimizer.step, model

    def zero(model):
        engine = start(model, adamw(model), config_of(stage))
        return engine.optimizer, engine.step, engine

    want = losses(stack(), plain)
    for got in on_ranks(RANKS, lambda rank, model: losses(model, zero)):
        assert got == pytest.approx(want, rel=1e-5)
