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
from tests.helpers.engines import STAGES, config_of, full_weights, start
from tests.helpers.models import ARCHITECTURES
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, run_steps, squared, stack
from tests.helpers.training import At, Plan, adamw, plain_sgd

RANKS = 2


def plain_state(build=stack):
    return {name: value.clone() for name, value in build().state_dict().items()}


def same(state, want, what=""):
    assert list(state) == list(want), f"{what}: names differ: {set(state) ^ set(want)}"
    for name, value in want.items():
        assert torch.equal(state[name], value), f"{what}: {name}"


@pytest.mark.turns
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["stack", "bert", "gpt2", "t5"])
def test_whole_on_the_bare_model_and_submodules(stage, name):
    build = stack if name == "stack" else ARCHITECTURES[name].build
    sub = {
        "stack": "blocks.1",
        "bert": "bert.encoder.layer.0",
        "gpt2": "transformer",
        "t5": "encoder",
    }[name]

    def run(rank, model):
        start(model, adamw(model), config_of(stage))
        want = plain_state(build)
        same(model.state_dict(), want, "model")
        part = {
            key.removeprefix(sub + "."): value
            for key, value in want.items()
            if key.startswith(sub + ".")
        }
        same(model.get_submodule(sub).state_dict(), part, sub)

    on_ranks(RANKS, run, build=build)


@pytest.mark.parametrize("stage", STAGES)
@on_each_rank(RANKS)
def test_it_is_a_copy_that_survives_training(rank, model, stage):
    engine = start(model, adamw(model), config_of(stage))
    state = (
        model.state_dict() if stage == 3 else {k: v.clone() for k, v in model.state_dict().items()}
    )
    run_steps(engine, rank, [0])
    same(state, plain_state())
    assert not torch.equal(model.state_dict()["head.weight"], state["head.weight"])


@pytest.mark.turns
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_engines_own(stage, tied):
    build = ARCHITECTURES["gpt2"].build if tied else stack

    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage))
        same(engine.state_dict(rank0_only=False), plain_state(build), "all ranks")
        on_one = engine.state_dict(rank0_only=True)
        if rank == 0:
            same(on_one, plain_state(build), "rank 0")
        else:
            assert not on_one
        sixteen = whole_state_dict(engine, everywhere=False)
        if rank == 0:
            same(sixteen, plain_state(build), "16 bit")
        pairs = dict(engine.consolidated())
        for name, value in pairs.items():
            assert value.device.type == "cpu" and torch.equal(value, plain_state(build)[name]), name
        assert set(pairs) == {name for name, _ in build().named_parameters()}

    on_ranks(RANKS, run, build=build)


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_can_be_left_out(stage):
    def build():
        model = stack()
        model.blocks[0].requires_grad_(False)
        return model

    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage))
        state = whole_state_dict(engine, everywhere=False, exclude_frozen=True)
        if rank == 0:
            same(state, {k: v for k, v in plain_state().items() if not k.startswith("blocks.0.")})

    on_ranks(RANKS, run, build=build)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_loading_into_the_bare_model_is_trained_on(stage, precision):
    def other():
        model = stack()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.75)
        return model

    want, _ = by_hand(plain_sgd, [[(1.0, 0)]] * 2, RANKS, build=other)

    def run(rank, model):
        plan = Plan(precision=precision)
        engine = start(model, plain_sgd(model), config_of(stage, plan))
        answer = model.load_state_dict(plain_state(other))
        assert not answer.missing_keys and not answer.unexpected_keys
        run_steps(engine, rank, range(2))
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors(
            "weights", weights, want, tolerance=1e-5 if precision == "fp32" else 1e-2
        )


@pytest.mark.parametrize("stage", STAGES)
@on_each_rank(RANKS)
def test_loading_into_a_submodule(rank, model, stage):
    engine = start(model, adamw(model), config_of(stage))
    model.blocks[2].load_state_dict(
        {
            name: torch.full_like(value, 0.5)
            for name, value in stack().blocks[2].state_dict().items()
        }
    )
    for name, value in full_weights(engine).items():
        want = torch.full_like(value, 0.5) if name.startswith("blocks.2.") else plain_state()[name]
        assert torch.equal(value, want), name


@pytest.mark.parametrize("stage", STAGES)
@on_each_rank(RANKS)
def test_bad_states_are_refused_and_leave_the_engine_sound(rank, model, stage):
    engine = start(model, adamw(model), config_of(stage))
    state = plain_state()
    with pytest.raises(RuntimeError, match=r"head\.bias"):
        model.load_state_dict({name: value for name, value in state.items() if name != "head.bias"})
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks\.0\.up\.weight"):
        model.load_state_dict(state | {"blocks.0.up.weight": torch.zeros(3, 3)})
    with pytest.raises(RuntimeError, match="surplus"):
        model.load_state_dict(state | {"surplus": torch.zeros(1)})
    answer = model.load_state_dict({"head.bias": torch.ones(5)}, strict=False)
    assert "head.weight" in answer.missing_keys
    same(model.state_dict(), state | {"head.bias": torch.ones(5)})
    run_steps(engine, rank, [0])


@pytest.mark.parametrize("stage", STAGES)
@on_each_rank(RANKS)
def test_16_bit_weights_of_a_trained_model(rank, model, stage):
    """Weights consolidated in 16 bits are the rounded masters."""
    plan = Plan(precision="bf16")
    engine = start(model, adamw(model), config_of(stage, plan))
    run_steps(engine, rank, [0])
    masters = full_weights(engine)
    state = whole_state_dict(engine, everywhere=False)
    if rank == 0:
        same(state, {name: value.bfloat16() for name, value in masters.items()})
    for name, value in engine.consolidated(dtype=torch.float32):
        assert torch.equal(value, masters[name]), name


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
        run_steps(engine, rank, [0])
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
        run_steps(engine, rank, [0])
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
        run_steps(engine, rank, [0])


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
