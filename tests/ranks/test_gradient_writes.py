"""Gradients that a script writes or clears between a backward and the step, as in a plain loop; a
plain ``.backward()`` through weights alone, which no hook of a module announces.
"""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.errors import PartitionError
from hf_zero.zero.access.local import safe_get_local_grad, safe_update_full_grad_vectorized
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_grads, full_weights, start
from tests.helpers.oracle import compare_tensors
from tests.helpers.stacks import on_each_rank, run_steps, squared, stack
from tests.helpers.training import At, Plan, adamw
from tests.ranks.cases import expect, values_of

RANKS, STEPS, WINDOW = 2, 3, 3
LIKE = torch.linspace(-1, 1, 32 * 64)


def at_the_end(model, at):
    """One is replaced, and the last layer held still; in the second step all are dropped."""
    if at.micro == WINDOW - 1:
        weight = model.blocks[1].up.weight
        weight.grad = LIKE.view(64, 32).to(weight.dtype) * (1 + at.step)
        for p in model.head.parameters() if at.step == 0 else ():
            p.grad = None
        for p in model.parameters() if at.step == 1 else ():
            p.grad = None


def in_the_middle(model, at):
    """One is set, and the next micro-batches add to it; the second step drops a micro-batch."""
    if at.micro == 1:
        weight = model.blocks[2].down.weight
        weight.grad = LIKE.view(32, 64).to(weight.dtype, copy=True)
        model.blocks[0].norm.bias.grad = None
    if (at.step, at.micro) == (1, 0):
        for p in model.parameters():
            p.grad = None


CPU = {"offload_optimizer": {"device": "cpu"}}
CELLS = [
    (at_the_end, 0, "fp16", {}),
    (in_the_middle, 1, "fp32", CPU),
    (in_the_middle, 2, "fp16", {}),
    (at_the_end, 3, "fp32", CPU),
    (in_the_middle, 3, "fp32", {}),
]


def limits(precision):
    return {"tolerance": 1e-5 if precision == "fp32" else 5e-3, "floor": 5e-6}


def by_hand(loss_of, window, write=lambda model, at: None):
    model = stack()
    optimizer = adamw(model)
    for step, micro in itertools.product(range(STEPS), range(window)):
        for rank in range(RANKS):
            (loss_of(model, At(step, micro, rank)) / (RANKS * window)).backward()
        write(model, At(step, micro, 0))
        if micro == window - 1:
            optimizer.step()
            optimizer.zero_grad()
    return values_of(model)


@in_turn("write, stage, precision, more", CELLS)
def test_a_gradient_that_a_script_writes_is_the_one_that_is_used(write, stage, precision, more):
    plan = Plan(ranks=RANKS, accumulation=WINDOW, precision=precision, scale=64.0)

    def run(rank, model):
        config = config_of(stage, plan)
        config["zero_optimization"] |= more
        engine = start(model, adamw(model), config)
        for step, micro in itertools.product(range(STEPS), range(WINDOW)):
            engine.backward(squared(engine, At(step, micro, rank), plan.dtype))
            write(model, At(step, micro, rank))
            engine.step()
        return full_weights(engine)

    expect(by_hand(squared, WINDOW, write), run, **limits(precision))


def test_gradients_that_no_backward_has_left_are_used():
    plain = stack()
    optimizer = adamw(plain)
    for step in range(STEPS):
        for p in plain.parameters():
            p.grad = torch.full_like(p, 0.5 * step + 0.25)  # the mean over ranks
        optimizer.step()

    def run(rank, model):
        plan = Plan(ranks=RANKS, precision="fp16", scale=64.0)
        engine = start(model, adamw(model), config_of(2, plan))
        for step in range(STEPS):
            if step == 1:
                for p in model.parameters():
                    p.grad = torch.full_like(p, float("inf"))
                engine.step()
                assert engine.optimizer.overflow
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.5 * step + 0.5 * rank)
            engine.step()
        return full_weights(engine)

    expect(values_of(plain), run, **limits("fp16"))


@in_turn("stage", (0, 1, 2, 3))
def test_gradients_that_a_script_takes_and_assigns_are_averaged(stage):
    """As in gradient surgery: torch.autograd.grad leaves no gradient in the engine."""

    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage))
        for step in range(STEPS):
            weights = list(model.parameters())
            loss = squared(engine, At(step, 0, rank))
            for p, gradient in zip(weights, torch.autograd.grad(loss, weights)):
                p.grad = gradient
            engine.step()
        return full_weights(engine)

    expect(by_hand(squared, 1), run, **limits("fp32"))


@in_turn("stage", (0, 2, 3))
def test_a_gradient_that_is_returned_is_no_micro_batch(stage):
    def run(rank, model):
        config = config_of(stage, Plan(ranks=RANKS, accumulation=WINDOW))
        config["zero_optimization"]["update_in_backward"] = True
        engine = start(model, adamw(model), config)
        for step, micro in itertools.product(range(STEPS), range(WINDOW)):
            loss = squared(engine, At(step, micro, rank))
            torch.autograd.grad(loss, model.head.bias, retain_graph=True)
            engine.backward(loss)
            engine.step()
        return full_weights(engine)

    expect(by_hand(squared, WINDOW), run, **limits("fp32"))


@on_each_rank(1)
def test_a_gradient_whose_update_has_begun_is_refused(rank, model):
    away = {"offload_optimizer": {"device": "cpu", "update_in_backward": True}}
    engine = start(model, adamw(model), config_of(2, zero_optimization={"stage": 2} | away))
    run_steps(engine, rank, [0])
    engine.backward(squared(engine, At(1, 0, rank)))
    with pytest.raises(PartitionError, match=r"head\.bias\.grad .* has updated the model"):
        model.head.bias.grad = None
    engine.step()
    engine.destroy()


@on_each_rank(RANKS)
def test_the_optimizers_state_has_no_entry_by_parameter(rank, model):
    optimizer = adamw(model)
    engine = start(model, optimizer, config_of(3))
    run_steps(engine, rank, [0])
    optimizer.load_state_dict(optimizer.state_dict())
    state, bias, segments = optimizer.state, model.head.bias, [*optimizer.state]
    uses = {
        "read": lambda: state[bias],
        "get": lambda: state.get(bias),
        "in": lambda: bias in state,
        "assign": lambda: state.__setitem__(bias, {}),
        "setdefault": lambda: state.setdefault(bias, {}),
        "update": lambda: state.update({bias: {}}),
        "del": lambda: state.__delitem__(bias),
        "pop": lambda: state.pop(bias, None),
    }
    for name, use in uses.items():
        with pytest.raises(PartitionError, match=r"optimizer\.state\[head\.bias\]") as caught:
            use()
        assert "safe_set_full_optimizer_state" in str(caught.value), name
    assert [*state] == segments and all(segment in state for segment in segments)
    assert hf_zero.safe_get_full_optimizer_state(model.head.bias, "exp_avg").shape == (5,)
    engine.destroy(gather=True)
    assert optimizer.state[model.head.bias] == {}


def penalty(model):
    return 0.1 * model.head.weight.float().square().sum()


def penalize(model, backward=torch.Tensor.backward):
    with hf_zero.GatheredParameters(model.head.weight):
        term = penalty(model)
    backward(term)


@in_turn("stage", (0, 2, 3))
@on_each_rank(RANKS, build=lambda: stack().double())
def test_gradients_in_fp64_are_read_and_updated_in_fp64(rank, model, stage):
    plain, double = stack().double(), torch.float64
    for other in range(RANKS):
        (squared(plain, At(0, 0, other), double) / RANKS).backward()
    want = {name: p.grad for name, p in plain.named_parameters()}
    engine = start(model, adamw(model), config_of(stage))
    engine.backward(squared(engine, At(0, 0, rank), double))
    named = dict(model.named_parameters())

    def read():
        return {name: hf_zero.safe_get_full_grad(p) for name, p in named.items()}

    before = read()
    for name, gradient in before.items():
        assert gradient.dtype == double
        torch.testing.assert_close(gradient, want[name], rtol=1e-12, atol=1e-15)
        part = safe_get_local_grad(named[name])
        assert part.dtype == double and torch.isin(part, gradient).all()
    safe_update_full_grad_vectorized(model.parameters(), lambda gradient, p: gradient)
    assert all(torch.equal(gradient, before[name]) for name, gradient in read().items())


@in_turn("stage", (1, 3))
@on_each_rank(RANKS)
def test_what_asks_for_gradients_finds_it(rank, model, stage):
    plain = stack()
    penalty(plain).backward()
    want = plain.head.weight.grad
    engine = start(model, adamw(model), config_of(stage))
    penalize(model)
    assert engine.gradient_norm() == pytest.approx(float(want.norm()), rel=1e-6)
    penalize(model)
    found = {"head.weight": full_grads(engine)["head.weight"]}
    compare_tensors("gradient", found, {"head.weight": 2 * want})
    penalize(model)
    with pytest.raises(PartitionError, match=r"the gradient of head\.weight has been taken in"):
        _ = model.head.weight.grad  # the last backward's would be a third of it
    engine.zero_grad()
    assert model.head.weight.grad is None
    with pytest.raises(PartitionError, match="there was no backward since"):
        engine.step()


@on_each_rank(RANKS)
def test_an_engine_dropped_on_all_ranks_is_collected_on_all(rank, model):
    """Else a rank that has not collected it reduces a gradient that the others do not see."""
    gc.disable()
    try:
        other = stack()
        dropped = [start(other, adamw(other), config_of(2, Plan(precision="fp16")))]
        del other
        if rank == 1:
            dropped.clear()
            gc.collect()
        dist.barrier()
        dropped.clear()
        engine = start(model, adamw(model), config_of(1))
    finally:
        gc.enable()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    engine.destroy()
