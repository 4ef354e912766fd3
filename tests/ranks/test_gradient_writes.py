"""``parameter.grad = None`` and ``parameter.grad = tensor`` between a backward and the step do
what they do in a plain loop.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import PartitionError
from tests.helpers.cells import fast
from tests.helpers.engines import STAGES, config_of, full_weights, start
from tests.helpers.oracle import compare_tensors
from tests.helpers.stacks import on_each_rank, on_ranks, squared, stack
from tests.helpers.training import At, Plan, adamw

RANKS, STEPS, WINDOW = 2, 3, 3
Write = Callable[[nn.Module, At], None]
LIKE = torch.linspace(-1, 1, 32 * 64)


def _cancelled_head(model: nn.Module, at: At) -> None:
    """The last layer is held still in the first steps."""
    if at.step < 2 and at.micro == WINDOW - 1:
        for p in model.head.parameters():
            p.grad = None


def _replaced(model: nn.Module, at: At) -> None:
    if at.micro == WINDOW - 1:
        weight = model.blocks[1].up.weight
        weight.grad = LIKE.view(64, 32).to(weight.dtype) * (1 + at.step)


def _dropped_micro_batch(model: nn.Module, at: At) -> None:
    """Discard the gradients of the first micro-batch of the second step."""
    if (at.step, at.micro) == (1, 0):
        for p in model.parameters():
            p.grad = None


def _begun_anew(model: nn.Module, at: At) -> None:
    """A gradient is set in the middle of a window, and the next micro-batches add to it."""
    if at.micro == 1:
        weight = model.blocks[2].down.weight
        weight.grad = LIKE.view(32, 64).to(weight.dtype, copy=True)
        model.blocks[0].norm.bias.grad = None


def _all_dropped(model: nn.Module, at: At) -> None:
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


def by_hand(write: Write) -> dict[str, torch.Tensor]:
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
    engine.backward(squared(engine, At(0, 0, rank)))
    engine.step()
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
