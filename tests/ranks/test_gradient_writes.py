"""Gradients that a script writes or clears between a backward and the step, as in a plain loop; a
plain ``.backward()`` through weights alone, which no hook of a module announces.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import PartitionError
from tests.helpers.cells import fast
from tests.helpers.engines import STAGES, config_of, full_grads, full_weights, start
from tests.helpers.oracle import compare_tensors
from tests.helpers.stacks import on_each_rank, on_ranks, run_steps, squared, stack
from tests.helpers.training import At, Plan, adamw

RANKS, STEPS, WINDOW = 2, 3, 3
Write = Callable[[nn.Module, At], None]
LIKE = torch.linspace(-1, 1, 32 * 64)


def _cancelled_head(model, at):
    """The last layer is held still in the first steps."""
    if at.step < 2 and at.micro == WINDOW - 1:
        for p in model.head.parameters():
            p.grad = None


def _replaced(model, at):
    if at.micro == WINDOW - 1:
        weight = model.blocks[1].up.weight
        weight.grad = LIKE.view(64, 32).to(weight.dtype) * (1 + at.step)


def _dropped_micro_batch(model, at):
    """Discard the gradients of the first micro-batch of the second step."""
    if (at.step, at.micro) == (1, 0):
        for p in model.parameters():
            p.grad = None


def _begun_anew(model, at):
    """A gradient is set in the middle of a window, and the next micro-batches add to it."""
    if at.micro == 1:
        weight = model.blocks[2].down.weight
        weight.grad = LIKE.view(32, 64).to(weight.dtype, copy=True)
        model.blocks[0].norm.bias.grad = None


def _all_dropped(model, at):
    if at.step == 1 and at.micro == WINDOW - 1:
        for p in model.parameters():
            p.grad = None


WRITES: dict[str, Write] = {
    each.__name__.strip("_"): each
    for each in (_cancelled_head, _replaced, _dropped_micro_batch, _begun_anew, _all_dropped)
}
CPU = {"offload_optimizer": {"device": "cpu"}}
SETTINGS = [
    *((stage, "fp32", {}) for stage in STAGES),
    (1, "fp32", CPU),
    (3, "fp32", CPU),
    (2, "fp16", {}),
    (0, "fp16", {}),
]
CELLS = fast(
    [(write, *setting) for write in WRITES for setting in SETTINGS],
    lambda write, *setting: (list(WRITES).index(write) + SETTINGS.index(setting)) % 2 == 0,
)


def by_hand(write):
    model = stack()
    optimizer = adamw(model)
    for step in range(STEPS):
        for micro in range(WINDOW):
            for rank in range(RANKS):
                (squared(model, At(step, micro, rank)) / (RANKS * WINDOW)).backward()
            write(model, At(step, micro, 0))
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("write", "stage", "precision", "more"), CELLS)
def test_a_gradient_that_a_script_writes_is_the_one_that_is_used(write, stage, precision, more):
    plan = Plan(ranks=RANKS, accumulation=WINDOW, precision=precision, scale=64.0)

    def run(rank, model):
        config = config_of(stage, plan)
        config["zero_optimization"] |= more
        engine = start(model, adamw(model), config)
        for step in range(STEPS):
            for micro in range(WINDOW):
                engine.backward(squared(engine, At(step, micro, rank), plan.dtype))
                WRITES[write](model, At(step, micro, rank))
                engine.step()
        weights = full_weights(engine)
        engine.destroy()
        return weights

    for got in on_ranks(RANKS, run):
        compare_tensors(
            f"weights, {write}",
            got,
            by_hand(WRITES[write]),
            1e-5 if precision == "fp32" else 5e-3,
            5e-6,
        )


@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (0, "fp16"), (2, "fp16")])
def test_gradients_that_no_backward_has_left_are_used(stage, precision):
    plan = Plan(ranks=RANKS, precision=precision, scale=64.0)
    plain = stack()
    optimizer = adamw(plain)
    for step in range(STEPS):
        for p in plain.parameters():
            p.grad = torch.full_like(p, 0.5 * step + 0.25)  # the mean over ranks
        optimizer.step()

    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage, plan))
        for step in range(STEPS):
            if step == 1 and precision == "fp16":
                for p in model.parameters():
                    p.grad = torch.full_like(p, float("inf"))
                engine.step()
                assert engine.optimizer.overflow
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.5 * step + 0.5 * rank)
            engine.step()
        weights = full_weights(engine)
        engine.destroy()
        return weights

    want = {name: p.detach() for name, p in plain.named_parameters()}
    for got in on_ranks(RANKS, run):
        compare_tensors("weights", got, want, 1e-5 if precision == "fp32" else 5e-3, 5e-6)


@pytest.mark.parametrize("stage", STAGES)
@on_each_rank(RANKS)
def test_a_gradient_of_another_shape_is_refused_by_torch_and_changes_nothing(rank, model, stage):
    engine = start(model, adamw(model), config_of(stage))
    engine.backward(squared(engine, At(0, 0, rank)))
    before = hf_zero.safe_get_full_grad(model.head.bias)
    with pytest.raises(RuntimeError, match="attempting to assign a gradient of size"):
        model.head.bias.grad = torch.zeros(6)
    assert torch.equal(hf_zero.safe_get_full_grad(model.head.bias), before)
    engine.step()
    engine.destroy()


def test_a_gradient_whose_update_has_begun_is_refused():
    def run(rank, model):
        config = config_of(2)
        config["zero_optimization"] |= {
            "offload_optimizer": {"device": "cpu", "update_in_backward": True}
        }
        engine = start(model, adamw(model), config)
        for step in range(2):
            engine.backward(squared(engine, At(step, 0, rank)))
            if step:
                with pytest.raises(
                    PartitionError,
                    match=r"writing head\.bias\.grad comes after a backward "
                    r"that has updated a part",
                ):
                    model.head.bias.grad = None
            engine.step()
        engine.destroy()

    on_ranks(1, run)


@pytest.mark.parametrize("stage", STAGES)
@on_each_rank(RANKS)
def test_the_optimizers_state_of_a_parameter_is_never_an_empty_dict(rank, model, stage):
    optimizer = adamw(model)
    engine = start(model, optimizer, config_of(stage))
    run_steps(engine, rank, [0])
    optimizer.load_state_dict(optimizer.state_dict())
    for ask in (
        lambda: optimizer.state[model.head.bias],
        lambda: optimizer.state.get(model.head.bias),
    ):
        with pytest.raises(
            PartitionError, match=r"optimizer\.state\[head\.bias\].*safe_get_full_optimizer_state"
        ):
            ask()
    assert hf_zero.safe_get_full_optimizer_state(model.head.bias, "exp_avg").shape == (5,)
    engine.destroy(gather=True)
    assert optimizer.state[model.head.bias] == {}


PLAIN_STEPS, PLAIN_WINDOW = 2, 2
PLACES = (
    "before the forward",
    "between forward and backward",
    "after the backward",
    "in a window of no_sync",
)


def penalty(model):
    return 0.1 * model.head.weight.float().square().sum()


def penalized_by_hand():
    model = stack()
    optimizer = adamw(model)
    for step in range(PLAIN_STEPS):
        optimizer.zero_grad()
        for micro in range(PLAIN_WINDOW):
            for rank in range(RANKS):
                (
                    (squared(model, At(step, micro, rank)) + penalty(model))
                    / (RANKS * PLAIN_WINDOW)
                ).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def _penalise(engine, model):
    with hf_zero.GatheredParameters(model.head.weight):
        term = penalty(model)
    term.backward()


@pytest.mark.turns
@pytest.mark.parametrize("plain", [True, False], ids=["loss.backward", "engine.backward"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("stage", "precision"), [*((stage, "fp32") for stage in STAGES), (0, "fp16"), (2, "fp16")]
)
def test_it_counts_wherever_it_stands(stage, precision, place, plain):
    plan = Plan(ranks=RANKS, accumulation=PLAIN_WINDOW, precision=precision, scale=64.0)

    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage, plan))
        for step in range(PLAIN_STEPS):
            for micro in range(PLAIN_WINDOW):
                if place == PLACES[0]:
                    _penalise(engine, model)
                loss = squared(engine, At(step, micro, rank), plan.dtype)
                if place == PLACES[1]:
                    _penalise(engine, model)
                loss.backward() if plain else engine.backward(loss)
                if place == PLACES[2]:
                    _penalise(engine, model)
                if place == PLACES[3]:
                    with engine.no_sync():
                        _penalise(engine, model)
                engine.step()
        weights = full_weights(engine)
        engine.destroy()
        return weights

    for got in on_ranks(RANKS, run):
        compare_tensors(
            f"weights, {place}",
            got,
            penalized_by_hand(),
            1e-5 if precision == "fp32" else 5e-3,
            5e-6,
        )


@pytest.mark.parametrize("stage", STAGES)
def test_what_asks_for_gradients_finds_it(stage):
    model = stack()
    penalty(model).backward()
    want = model.head.weight.grad

    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage))
        _penalise(engine, model)
        assert engine.gradient_norm() == pytest.approx(float(want.norm()), rel=1e-6)
        _penalise(engine, model)
        compare_tensors(
            "gradient",
            {"head.weight": full_grads(engine)["head.weight"]},
            {"head.weight": 2 * want},
        )
        _penalise(engine, model)
        with pytest.raises(PartitionError, match=r"the gradient of head\.weight has been taken in"):
            _ = model.head.weight.grad  # the last backward's would be a third of it
        engine.zero_grad()
        assert model.head.weight.grad is None
        with pytest.raises(PartitionError, match="there was no backward since"):
            engine.step()

    on_ranks(RANKS, run)


@on_each_rank(RANKS)
def test_a_gradient_runs_no_python_of_its_own_unless_a_loss_may_be_scaled(rank, model):
    """A model of many small parameters would spend its host time there."""
    other = stack()
    engine = start(model, adamw(model), config_of(2))
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    scaling = start(other, adamw(other), config_of(2, Plan(precision="fp16")))
    assert all(p._post_accumulate_grad_hooks for each in (model, other) for p in each.parameters())
    engine.destroy()
    scaling.destroy()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
