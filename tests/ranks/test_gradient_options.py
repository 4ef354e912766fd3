"""Options that change how gradients travel and add up, none of which may change what they are."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import oracle
from tests.helpers.engines import (
    STAGES,
    config_of,
    engine_opener,
    full_grads,
    full_weights,
    start,
    train_on_threads,
)
from tests.helpers.models import Stack, seeded
from tests.helpers.stacks import on_ranks, squared
from tests.helpers.training import At, Plan, StackJob, plain_sgd

RANKS = 2


class PlainStack(StackJob):
    name = "plain stack with sgd"

    def optimizer(self, model):
        return plain_sgd(model)


@pytest.mark.turns
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "options",
    [
        {"prescale_gradients": True},
        {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
        {"gradient_predivide_factor": 2.0},
        {"communication_data_type": "fp32"},
        {"data_types": {"grad_accum_dtype": "fp32"}},
    ],
    ids=str,
)
def test_gradients_are_the_same(stage, options):
    plan = Plan(ranks=RANKS, steps=3, accumulation=2)
    got = train_on_threads(PlainStack(), plan, engine_opener(stage, **options))
    oracle.compare(got, oracle.kept(PlainStack(), plan), weight_floor=oracle.ROUNDING)


@pytest.mark.turns
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("clip", [0.05, 1e4])
def test_clipping(stage, clip):
    """The norm reported is the one before clipping; a large limit changes nothing."""
    plan = Plan(ranks=RANKS, steps=4, accumulation=2, clip=clip)
    got = train_on_threads(PlainStack(), plan, engine_opener(stage))
    want = oracle.kept(PlainStack(), plan)
    assert (max(want.norms) > clip) == (clip < 1)
    oracle.compare(got, want, weight_floor=oracle.ROUNDING)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_communication_in_16_bits_rounds_and_no_more(stage, dtype):
    """In fp32 training, gradients sent in 16 bits are off by that rounding: not exact, not
    worse.
    """
    plan = Plan(ranks=RANKS, steps=1)
    got = train_on_threads(PlainStack(), plan, engine_opener(stage, communication_data_type=dtype))
    want = oracle.kept(PlainStack(), plan)
    eps = torch.finfo({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]).eps
    error = oracle.errors(got, want)["gradients"] / want.norms[0]
    assert 0.02 * eps < error < eps, f"relative error {error:.3g}, rounding of {dtype} is {eps:.3g}"


class Adds(torch.nn.Module):
    """Its loss is the mean of weight times x: the gradient of a weight is x."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(1, 16, bias=False) for _ in range(2))

    def forward(self, x):
        return sum(block(x).sum() for block in self.blocks)


@pytest.mark.turns
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("accumulate, exact", [(None, True), ("fp32", True), ("bf16", False)])
def test_small_addends_survive_in_fp32(stage, accumulate, exact):
    """1 + 100 × 2^-9 is 1.195 in fp32 and stays 1 where bf16 accumulates: the config decides,
    and by default it is fp32.
    """
    more = {"data_types": {"grad_accum_dtype": accumulate}} if accumulate else {}

    def run(rank, model):
        engine = start(
            model,
            plain_sgd(model),
            config_of(stage, Plan(accumulation=101, precision="bf16"), **more),
        )
        for micro in range(101):
            x = torch.full((1, 1), 1.0 if micro == 0 else 2.0**-9, dtype=torch.bfloat16)
            engine.backward(engine(x), scale_wrt_gas=False)
            if micro < 100:
                engine.step()
        return full_grads(engine)

    for grads in on_ranks(RANKS, run, build=lambda: seeded(Adds)):
        for name, grad in grads.items():
            want = 1 + 100 * 2.0**-9 if exact else 1.0
            assert torch.allclose(grad, torch.full_like(grad, want), rtol=1e-3), (
                f"{name}: {grad.flatten()[0]:.6f}, expected {want:.6f}"
            )


@pytest.mark.turns
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_norm_is_a_float_everywhere(stage, precision):
    def run(rank, model):
        plan = Plan(precision=precision)
        engine = start(model, plain_sgd(model), config_of(stage, plan))
        engine.backward(squared(engine, At(0, 0, rank), plan.dtype))
        engine.step()
        norm = engine.get_global_grad_norm()
        assert type(norm) is float
        full_weights(engine)
        return norm

    found = on_ranks(RANKS, run)
    assert found == [found[0]] * RANKS
    assert found[0] == pytest.approx(
        oracle.kept(PlainStack(), Plan(ranks=RANKS, steps=1)).norms[0],
        rel=2e-2 if precision == "bf16" else 5e-3,
    )


@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_to_clip_to_may_change_between_steps(stage):
    """A trainer of its own clips each step as it likes; the config gives the first value."""
    limits = [0.5, 0.05, 0.0]

    def by_hand_step(model, optimizer, step):
        optimizer.zero_grad()
        for rank in range(RANKS):
            (squared(model, At(step, 0, rank)) / RANKS).backward()
        if limits[step]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), limits[step])
        optimizer.step()

    model = seeded(Stack)
    optimizer = plain_sgd(model)
    for step in range(len(limits)):
        by_hand_step(model, optimizer, step)
    want = {name: p.detach() for name, p in model.named_parameters()}

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage, gradient_clipping=limits[0]))
        assert engine.max_norm == limits[0]
        for step, limit in enumerate(limits):
            engine.max_norm = limit
            engine.backward(squared(engine, At(step, 0, rank)))
            engine.step()
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want)
