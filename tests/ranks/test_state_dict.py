"""State dicts at every stage, of the engine, the bare model and a submodule; safe_get_full_* and
safe_set_full_*, on every rank.
"""

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import PartitionError
from hf_zero.zero.access.consolidate import whole_state_dict
from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import ARCHITECTURES
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, run_steps, squared, stack
from tests.helpers.training import At, Plan, adamw, plain_sgd
from tests.ranks.cases import expect

RANKS = 2


def plain_state(build=stack):
    return {name: value.clone() for name, value in build().state_dict().items()}


def scaled(factor=0.75):
    model = stack()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(factor)
    return model


def same(state, want, what=""):
    assert list(state) == list(want), f"{what}: names differ: {set(state) ^ set(want)}"
    for name, value in want.items():
        assert torch.equal(state[name], value), f"{what}: {name}"


PARTS = {"bert": "bert.encoder.layer.0", "gpt2": "transformer", "t5": "encoder"}


@in_turn("stage, name", [(0, "stack"), (2, "t5"), (3, "bert"), (3, "gpt2")])
def test_whole_of_the_engine_the_bare_model_and_submodules(stage, name):
    """On every rank, on the first alone, and parameter by parameter."""
    build = stack if name == "stack" else ARCHITECTURES[name].build
    want, sub = plain_state(build), PARTS.get(name, "blocks.1")

    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage))
        same(model.state_dict(), want, "model")
        own = {key: value for key, value in want.items() if key.startswith(sub + ".")}
        part = {key.removeprefix(sub + "."): value for key, value in own.items()}
        same(model.get_submodule(sub).state_dict(), part, sub)
        same(engine.state_dict(rank0_only=False), want, "all ranks")
        on_one = engine.state_dict(rank0_only=True), whole_state_dict(engine, everywhere=False)
        for state in on_one:
            same(state or {}, want if rank == 0 else {}, "rank 0")
        pairs = dict(engine.consolidated())
        assert set(pairs) == {name for name, _ in build().named_parameters()}
        for name, value in pairs.items():
            assert value.device.type == "cpu" and torch.equal(value, want[name]), name

    on_ranks(RANKS, run, build=build)


@in_turn("stage, precision", [(0, "bf16"), (1, "fp32"), (3, "bf16")])
def test_loading_into_the_bare_model_is_trained_on(stage, precision):
    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage, Plan(precision=precision)))
        answer = model.load_state_dict(plain_state(scaled))
        assert not answer.missing_keys and not answer.unexpected_keys
        run_steps(engine, rank, range(2))
        return full_weights(engine)

    want, _ = by_hand(plain_sgd, [[(1.0, 0)]] * 2, RANKS, build=scaled)
    expect(want, run, tolerance=1e-5 if precision == "fp32" else 1e-2)


@in_turn("stage", (1, 3))
@on_each_rank(RANKS)
def test_states_of_a_part_bad_ones_and_those_without_what_is_frozen(rank, model, stage):
    """What does not fit is refused by its name and leaves the engine sound."""
    model.blocks[0].requires_grad_(False)
    engine, want = start(model, adamw(model), config_of(stage)), plain_state()
    trained = {k: v for k, v in want.items() if not k.startswith("blocks.0.")}
    state = whole_state_dict(engine, everywhere=False, exclude_frozen=True)
    same(state or {}, trained if rank == 0 else {})
    half = {name: torch.full_like(p, 0.5) for name, p in stack().blocks[2].named_parameters()}
    model.blocks[2].load_state_dict(half)
    want |= {f"blocks.2.{name}": value for name, value in half.items()}
    same(full_weights(engine), want)
    lacking = {name: value for name, value in want.items() if name != "head.bias"}
    for state, said in (
        (lacking, r"head\.bias"),
        (want | {"blocks.0.up.weight": torch.zeros(3, 3)}, r"mismatch for blocks\.0\.up\.weight"),
        (want | {"surplus": torch.zeros(1)}, "surplus"),
    ):
        with pytest.raises(RuntimeError, match=said):
            model.load_state_dict(state)
    answer = model.load_state_dict({"head.bias": torch.ones(5)}, strict=False)
    assert "head.weight" in answer.missing_keys
    want |= {"head.bias": torch.ones(5)}
    state = {
        name: value if stage == 3 else value.clone() for name, value in model.state_dict().items()
    }
    run_steps(engine, rank, [0])
    same(state, want, "a copy survives the training")
    assert not torch.equal(model.state_dict()["head.weight"], state["head.weight"])


@in_turn("stage", (1, 3))
@on_each_rank(RANKS)
def test_weights_of_a_model_in_16_bits(rank, model, stage):
    """Consolidated in 16 bits they are the rounded masters, which are read in fp32."""
    plain = plain_state()
    engine = start(model, adamw(model), config_of(stage, Plan(precision="bf16")))
    for name, p in model.named_parameters():
        assert p.dtype == torch.bfloat16
        value = hf_zero.safe_get_full_fp32_param(p)
        assert value.dtype == torch.float32 and torch.equal(value, plain[name]), name
    run_steps(engine, rank, [0])
    masters = full_weights(engine)
    state = whole_state_dict(engine, everywhere=False)
    if rank == 0:
        same(state, {name: value.bfloat16() for name, value in masters.items()})
    for name, value in engine.consolidated(dtype=torch.float32):
        assert torch.equal(value, masters[name]), name


# ---- one parameter ----


@in_turn("stage", (0, 1, 3))
@on_each_rank(RANKS)
def test_values_and_gradients_that_are_set_are_stepped_with(rank, model, stage):
    """A gradient set before the backward would be lost."""
    engine, want = start(model, plain_sgd(model), config_of(stage)), plain_state()
    weight = model.blocks[1].up.weight
    want["blocks.1.up.weight"] *= 0.5
    hf_zero.safe_set_full_fp32_param(weight, hf_zero.safe_get_full_fp32_param(weight) * 0.5)
    assert torch.equal(hf_zero.safe_get_full_fp32_param(weight), want["blocks.1.up.weight"])
    for _ in range(2):
        with pytest.raises(PartitionError, match=r"head\.weight has no gradient yet"):
            hf_zero.safe_set_full_grad(model.head.weight, torch.ones(5, 32))
        engine.backward(squared(engine, At(0, 0, rank)))
        for p in model.parameters():
            hf_zero.safe_set_full_grad(p, torch.full(p.shape, 0.5))
            assert torch.equal(hf_zero.safe_get_full_grad(p), torch.full(p.shape, 0.5))
        engine.step()
        want = {name: value - 0.05 * 0.5 for name, value in want.items()}
        oracle.compare_tensors("weights", full_weights(engine), want)


def gradients_of_a_step():
    model = stack()
    for rank in range(RANKS):
        (squared(model, At(0, 0, rank)) / RANKS).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@in_turn("stage", (1, 3))
@on_each_rank(RANKS)
def test_optimizer_state_is_read_and_set(rank, model, stage):
    gradients = gradients_of_a_step()
    read = hf_zero.safe_get_full_optimizer_state
    engine, named = start(model, adamw(model), config_of(stage)), dict(model.named_parameters())
    run_steps(engine, rank, [0])
    first = {name: read(p, "exp_avg") for name, p in named.items()}
    second = {name: read(p, "exp_avg_sq") for name, p in named.items()}
    oracle.compare_tensors("first", first, {name: 0.1 * g for name, g in gradients.items()})
    squares = {name: 0.001 * g.square() for name, g in gradients.items()}
    oracle.compare_tensors("second", second, squares)
    p, half = named["blocks.2.down.weight"], torch.full((32, 64), 0.5)
    hf_zero.safe_set_full_optimizer_state(p, half, "exp_avg")
    assert torch.equal(read(p, "exp_avg"), half)
    assert torch.equal(read(named["head.weight"], "exp_avg"), first["head.weight"])


def test_parameters_that_no_engine_owns():
    p = nn.Parameter(torch.arange(3.0))
    assert hf_zero.safe_get_full_fp32_param(p).tolist() == [0, 1, 2]
    assert hf_zero.safe_get_full_grad(p) is None
    p.grad = torch.ones(3)
    assert hf_zero.safe_get_full_grad(p).tolist() == [1, 1, 1]
    hf_zero.safe_set_full_fp32_param(p, torch.zeros(3))
    assert p.tolist() == [0, 0, 0]
