"""Adapters over quantized weights: bytes are sharded and gathered as they are, and their class and
attributes stay.
"""

import copy
import pickle

import peft
import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.distributed import process_group
from hf_zero.errors import PartitionError, RankMismatchError, ReleasedParameterError
from hf_zero.loading.shard_only import hold
from hf_zero.zero.access.consolidate import whole_state_dict
from hf_zero.zero.layout.parameter import OwnedParameter, ReleasedParameter
from hf_zero.zero.layout.parameter_classes import ParameterClasses, parameter_classes
from tests.helpers import oracle
from tests.helpers.cells import in_one_item, in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import HIDDEN, Stack
from tests.helpers.packed import Linear4bit, LinearOfBytes, Params4bit, quantize
from tests.helpers.ranks import RankFailed
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, run_steps, stack
from tests.helpers.training import Plan

RANKS, STEPS = 2, 3


@pytest.fixture(autouse=True)
def one_process():
    yield
    process_group.destroy_process_group()


PACKED = [f"blocks.{number}.up.base_layer.weight" for number in range(3)]


def base(storage=torch.uint8, width=HIDDEN):
    """A stack of 4-bit, int8 and fp8 layers and a plain one."""
    model = Stack(width=width)
    for block, dtype in zip(model.blocks, (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)):
        block.up, block.down = Linear4bit.of(block.up, storage), LinearOfBytes(block.down, dtype)
    return model


def adapted(storage=torch.uint8, width=HIDDEN):
    """LoRA over :func:`base`; its B is not zero, so that each adapter has a gradient at once."""
    model = peft.get_peft_model(
        base(storage, width),
        peft.LoraConfig(r=4, target_modules=["up", "head"], init_lora_weights=False),
    ).base_model.model
    assert not any(p.requires_grad for name, p in model.named_parameters() if "lora_" not in name)
    return model


def build(storage=torch.uint8, width=HIDDEN):
    def made():
        with torch.random.fork_rng():  # helpers.models.seeded would cast the bytes
            torch.manual_seed(1234)
            return adapted(storage, width)

    return made


def adam(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-6)


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def adapters(weights):
    return {name: value for name, value in weights.items() if "lora_" in name}


def alike(one, other):
    return one.dtype == other.dtype and torch.equal(
        *(tensor.detach().reshape(-1).view(torch.uint8) for tensor in (one, other))
    )


@in_turn("stage, storage", [(0, torch.int8), (2, torch.uint8), (3, torch.bfloat16)])
def test_the_numbers_are_those_of_one_process(stage, storage):
    want, norms = by_hand(adam, [[(1.0, 0)]] * STEPS, RANKS, build=build(storage))
    given = build(storage)()

    def run(rank, model):
        engine = start(model, adam(model), config_of(stage))
        got = []
        for step in range(STEPS):
            run_steps(engine, rank, [step])
            got.append(engine.get_global_grad_norm())
        with hf_zero.GatheredParameters(list(model.parameters())):
            frozen = {
                name: p.detach().clone()
                for name, p in model.named_parameters()
                if not p.requires_grad
            }
        return full_weights(engine), got, frozen

    for weights, got, frozen in on_ranks(RANKS, run, build=build(storage)):
        oracle.compare_tensors("weights", adapters(weights), adapters(want))
        assert got == pytest.approx(norms, rel=1e-5)
        assert all(alike(value, given.get_parameter(name)) for name, value in frozen.items()), (
            "frozen bytes have changed"
        )


@in_turn("stage, precision, storage", [(2, "bf16", torch.float16), (3, "fp16", torch.bfloat16)])
def test_no_precision_casts_bytes_and_state_dicts_have_what_layers_write(stage, precision, storage):
    given, plan = build(storage)(), Plan(precision=precision)

    def run(rank, model):
        engine = start(model, adam(model), config_of(stage, plan))
        run_steps(engine, rank, range(2))
        assert engine.module.enter.weight.dtype == plan.dtype
        return whole_state_dict(engine, everywhere=False), engine.state_dict()

    (whole, each), (nothing, other) = on_ranks(RANKS, run, build=build(storage))
    want = given.state_dict()
    beside = [name for name in want if ".weight." in name]
    assert nothing is None and "blocks.0.up.base_layer.weight.absmax" in beside
    for state in (whole, each, other):
        assert list(state) == list(want)
        frozen = [name for name in state if name in PACKED or "down.weight" in name]
        assert len(frozen) == 6
        assert all(alike(state[name], want[name]) for name in (*frozen, *beside))


@on_each_rank(RANKS, build=build())
def test_class_name_and_attributes_are_there_in_every_state(rank, model):
    weight = model.get_parameter(PACKED[0])
    values, state = weight.detach().clone(), weight.quant_state
    engine = start(model, adam(model), config_of(3))
    assert isinstance(weight, ReleasedParameter) and isinstance(weight, Params4bit)
    assert (type(weight).__name__, type(weight).__module__) == (
        "Params4bit",
        "tests.helpers.packed",
    )
    assert (
        weight.quant_state is state
        and weight.bnb_quantized
        and weight.module is model.blocks[0].up.base_layer
    )
    assert not isinstance(model.enter.weight, Params4bit)
    with pytest.raises(ReleasedParameterError, match=r"t on blocks\.0\.up\.base_layer\.weight"):
        weight.t()
    with hf_zero.GatheredParameters(weight):
        assert isinstance(weight, Params4bit) and torch.equal(weight, values)
        parts = torch.chunk(weight, 2)  # its own __torch_function__
        assert {type(part) for part in parts} == {Params4bit} and parts[0].quant_state is state
        copied = copy.deepcopy(weight)
        loaded = pickle.loads(
            pickle.dumps(torch.nn.Parameter(weight.detach().clone(), requires_grad=False))
        )
    assert (
        type(copied) is Params4bit and torch.equal(copied, values) and torch.equal(loaded, values)
    )
    assert copied.quant_state is not state and torch.equal(copied.quant_state.absmax, state.absmax)
    engine.destroy(gather=True)
    assert (
        type(weight) is Params4bit and torch.equal(weight, values) and weight.quant_state is state
    )
    assert not any(name.startswith("_hf_zero") for name in weight.__dict__)


@in_turn("stage", [0, 3])
def test_a_trainer_s_second_engine_gets_the_classes_of_the_first(stage):
    """Whole again, with the weights that one engine reaches in the steps of both."""

    def run(rank, model):
        classes = {name: type(parameter) for name, parameter in model.named_parameters()}
        for step in range(STEPS):
            engine = start(model, sgd(model), config_of(stage))
            run_steps(engine, rank, [step])
            engine.destroy_and_restore()
            after = {name: type(model.get_parameter(name)) for name in classes}
            assert after == classes and Params4bit in classes.values()
        return {name: value.clone() for name, value in model.state_dict().items()}

    want, _ = by_hand(sgd, [[(1.0, 0)]] * STEPS, RANKS, build=build())
    for weights in on_ranks(RANKS, run, build=build()):
        oracle.compare_tensors("weights", adapters(weights), adapters(want))


def test_ranks_with_other_scales_are_told():
    def run(rank, model):
        if rank == 1:
            model.get_parameter(PACKED[1]).quant_state.absmax = torch.ones(3)
        start(model, adam(model), config_of(3))

    with pytest.raises(
        RankFailed,
        match=r"models: shape of blocks\.1\.up\.base_layer\.weight is Params4bit .*absmax",
    ) as caught:
        on_ranks(RANKS, run, build=build())
    assert isinstance(caught.value.__cause__, RankMismatchError)


class Closed(nn.Parameter):
    def __init_subclass__(cls, **options):
        raise TypeError("final")


class Wrapped(torch.Tensor):
    """A tensor without memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return Wrapped(args[0])


def test_classes_that_cannot_be_laid_out():
    cpu, refusal = torch.device("cpu"), parameter_classes().refusal
    for parameter in (
        nn.Parameter(Wrapped(torch.zeros(2))),
        nn.UninitializedParameter(),
        Closed(torch.zeros(2)),
    ):
        assert f"is a {type(parameter).__name__}, whose memory cannot be laid out flat" in refusal(
            parameter, cpu
        )
    packed, state = quantize(torch.randn(64, 2), torch.uint8)
    assert refusal(Params4bit(packed, False, state), cpu) is None
    core = ParameterClasses()  # without the row of those that it knows
    assert core.refusal(nn.Parameter(torch.zeros(2)), cpu) is None
    assert "is a Params4bit, whose memory cannot be laid out flat; pass" in core.refusal(
        Params4bit(packed, False, state), cpu
    )
    assert core.describe(Params4bit(packed, False, state)) == "Params4bit"
    assert (
        "is a Params4bit on cpu, and the engine computes on cuda; move the model there before"
        in refusal(Params4bit(packed, False, state), torch.device("cuda"))
    )


def whole_memory(weight):
    """Sharding would save nothing."""
    packed = Params4bit(weight.detach(), False)
    packed.CB = packed.data.view(-1)
    return packed


@in_one_item(
    [
        (whole_memory, r"head\.weight is a Params4bit whose attribute CB keeps its whole memory"),
        (
            lambda weight: nn.Parameter(weight.detach().to(torch.float8_e4m3fn)),
            r"head\.weight is torch\.float8_e4m3fn",
        ),
    ]
)
def test_parameters_that_are_refused(case):
    made, said = case
    model = stack()
    model.head.weight = made(model.head.weight)
    with pytest.raises(PartitionError, match=said):
        start(model, None, config_of(3))
    assert not any(isinstance(p, OwnedParameter) for p in model.parameters())


@on_each_rank(RANKS, build=build(width=128))
def test_a_model_that_is_only_held_can_be_cast(rank, model):
    """As PEFT does before a training in few bits, and scripts with ``model.to``."""
    want = {name: value.clone() for name, value in model.state_dict().items()}
    enter, packed = model.enter.weight, model.get_parameter(PACKED[0])
    hold(model.to(torch.bfloat16), ZeroConfig(stage=3))
    scales = packed.quant_state.absmax
    assert isinstance(scales, ReleasedParameter) and scales.dtype == torch.float32
    assert enter.dtype == torch.bfloat16
    with pytest.raises(ReleasedParameterError, match=r"add on enter\.weight"):
        enter.data.to(torch.float32) + 1
    enter.data = enter.data.to(torch.float32)
    with hf_zero.GatheredParameters([enter]):  # reads leave the cast to the next engine
        assert enter.dtype == torch.bfloat16
    assert enter.dtype == torch.float32 and isinstance(enter, ReleasedParameter)
    assert copy.deepcopy(enter).dtype == torch.float32
    model.blocks[0].up.base_layer.register_parameter("bias", None)
    model.blocks[0].up.base_layer.to(torch.bfloat16)  # its scales stay
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.float32)
    engine = start(model, adam(model), config_of(3))
    whole = dict(engine.consolidated())
    assert whole["enter.weight"].dtype == torch.float32
    assert torch.equal(whole["enter.weight"], want["enter.weight"].bfloat16().float())
    assert alike(whole[f"{PACKED[0]}.absmax"], want[f"{PACKED[0]}.absmax"])
    assert alike(whole[PACKED[0]], want[PACKED[0]])
    with pytest.raises(ReleasedParameterError, match=r"to on enter\.weight"):
        enter.data.to(torch.bfloat16)
