"""Adapters over 4-bit and int8 layers of bitsandbytes, and over weights without memory of their own
as those of torchao, at every stage against the same model in one process. Those libraries have
stand-ins; they run where they are installed: ``pip install bitsandbytes torchao``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.distributed import process_group
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.zero.layout.attributes import AttachedParameter, parts_of
from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import Stack
from tests.helpers.packed import RowsOfBytes
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, run_steps, stack
from tests.ranks.test_quantized import adam, adapters, alike

RANKS, STEPS = 2, 3


@pytest.fixture(autouse=True)
def one_process():
    yield
    process_group.destroy_process_group()


def of_torchao(name: str) -> Callable[[nn.Linear], nn.Linear]:
    quantization = pytest.importorskip("torchao.quantization", reason="pip install torchao")

    def quantized(linear: nn.Linear) -> nn.Linear:
        quantization.quantize_(linear, getattr(quantization, name)())
        return linear

    return quantized


def of_bitsandbytes(**bits: Any) -> Callable[[nn.Linear], nn.Linear]:
    """Layers of 4 bits with the settings ``bits``, or of int8."""
    layers = pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes").nn

    def quantized(linear: nn.Linear) -> nn.Linear:
        weight, sizes = linear.weight.detach(), (linear.in_features, linear.out_features)
        if bits:
            made = layers.Linear4bit(*sizes, **bits)
            made.weight = layers.Params4bit(weight, module=made, **bits).to("cpu")
        else:
            made = layers.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=6.0)
            int8 = layers.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
            made.weight = int8.to("cpu")
        made.bias = linear.bias
        return made

    return quantized


NF4 = {"quant_type": "nf4", "compress_statistics": True, "quant_storage": torch.uint8}
FP4 = {"quant_type": "fp4", "compress_statistics": False, "quant_storage": torch.bfloat16}
KINDS: dict[str, Callable[[], Callable[[nn.Linear], nn.Linear]]] = {
    "stand-in": lambda: RowsOfBytes.quantized,
    "torchao int8": lambda: of_torchao("Int8WeightOnlyConfig"),
    "torchao float8": lambda: of_torchao("Float8WeightOnlyConfig"),
    "bitsandbytes int8": of_bitsandbytes,
    "bitsandbytes nf4": lambda: of_bitsandbytes(**NF4),
    "bitsandbytes fp4": lambda: of_bitsandbytes(**FP4),
}


def build(kind: str = "stand-in", width: int = 160) -> Callable[[], Any]:
    """A stack with a row of more than 256 outputs in each block."""
    quantized = KINDS[kind]()

    def made() -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(1234)
            model = Stack(width=width)
            for block in model.blocks:
                block.up, block.down = quantized(block.up), quantized(block.down)
            config = peft.LoraConfig(
                r=4, target_modules=["up", "down", "head"], init_lora_weights=False
            )
            return peft.get_peft_model(model, config).base_model.model

    return made


SHARDED = {"stage": 3, "stage3_param_persistence_threshold": 0}


def parts(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The plain tensors of a state dict."""
    found = {}
    for name, value in state.items():
        names = parts_of(value)
        found |= {f"{name}.{part}": getattr(value, part) for part in names} or {name: value}
    return found


def assert_frozen_alike(state: dict[str, torch.Tensor], given: dict[str, torch.Tensor]) -> None:
    assert set(state) == set(given)
    mine, theirs = parts(state), parts(given)
    assert set(mine) == set(theirs)
    assert all(alike(mine[name], theirs[name]) for name in theirs if "lora_" not in name)


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_one_process(kind: str) -> None:
    made = build(kind)
    want, norms = by_hand(adam, [[(1.0, 0)]] * STEPS, RANKS, build=made)
    given = made().state_dict()
    host = {"device": "cpu"}
    for zero in ({"stage": 0}, {"stage": 2}, SHARDED, {**SHARDED, "offload_param": host}):

        def run(rank: int, model: Any, zero: dict[str, Any] = zero) -> Any:
            engine = start(model, adam(model), config_of(zero["stage"], zero_optimization=zero))
            got = []
            for step in range(STEPS):
                run_steps(engine, rank, [step])
                got.append(engine.get_global_grad_norm())
            return full_weights(engine), got, model.state_dict()

        for weights, got, state in on_ranks(RANKS, run, build=made):
            oracle.compare_tensors("weights", adapters(weights), adapters(want))
            assert got == pytest.approx(norms, rel=1e-5)
            assert_frozen_alike(state, given)


@on_each_rank(RANKS, build=build(width=192))
def test_bytes_and_scales_are_sharded_and_gathered(rank: int, model: Any) -> None:
    rows = [
        block.get_submodule(name).base_layer for block in model.blocks for name in ("up", "down")
    ]
    packed = sum(layer.weight.qdata.nbytes + layer.weight.scale.nbytes for layer in rows)
    others = sum(p.nbytes for p in model.parameters() if not parts_of(p))
    engine = start(model, adam(model), config_of(3, zero_optimization=SHARDED))
    assert all(isinstance(each.weight.qdata, AttachedParameter) for each in rows)
    padding = 4 * RANKS * 256 * len(engine.flats)
    share = engine.state_bytes()["parameters"]
    assert (packed + others) / RANKS <= share <= (packed + others + padding) / RANKS
    for step in range(2):
        engine.mesh.stats.bytes.clear()
        run_steps(engine, rank, [step])
    moved = engine.mesh.stats.bytes["all_gather"]
    assert packed + others <= moved <= 2 * (packed + others + padding)


@pytest.mark.parametrize("kind", ["stand-in", "bitsandbytes int8"])
def test_a_run_resumes_on_other_ranks_and_stages(kind: str, tmp_path: Any) -> None:
    made = build(kind)

    def saves(rank: int, model: Any) -> Any:
        engine = start(model, adam(model), config_of(3, zero_optimization=SHARDED))
        run_steps(engine, rank, [0])
        engine.save_checkpoint(tmp_path)
        return full_weights(engine), model.state_dict()

    weights, given = on_ranks(RANKS, saves, build=made)[0]

    def resumes(rank: int, model: Any, stage: int) -> None:
        for layer in model.modules():
            weight = getattr(layer, "weight", None)
            for part in parts_of(weight) if weight is not None else ():
                getattr(weight, part).zero_()
        engine = start(model, adam(model), config_of(stage))
        engine.load_checkpoint(tmp_path)
        oracle.compare_tensors("weights", adapters(full_weights(engine)), adapters(weights))
        assert_frozen_alike(model.state_dict(), given)

    on_ranks(1, resumes, 0, build=made)
    on_ranks(3, resumes, 3, build=made)


@on_each_rank(RANKS, build=build())
def test_state_dicts_have_the_weights_and_take_them(rank: int, model: Any) -> None:
    given = copy.deepcopy(model.state_dict())
    engine = start(model, adam(model), config_of(3, zero_optimization=SHARDED))
    with hf_zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        for name, parameter in model.named_parameters():
            if name.endswith("_weight_qdata"):
                parameter.zero_()
    assert not model.state_dict()["blocks.0.up.base_layer.weight"].qdata.any()
    model.load_state_dict(given)
    assert_frozen_alike(model.state_dict(), given)
    engine.destroy(gather=True)
    engine = start(model, adam(model), config_of(2))
    assert_frozen_alike(model.state_dict(), given)


@on_each_rank(RANKS, build=build())
def test_an_initialize_that_fails_leaves_the_weights_as_they_were(rank: int, model: Any) -> None:
    layer = model.blocks[0].up.base_layer
    weight, qdata, names = layer.weight, layer.weight.qdata, list(layer._parameters)

    def fails(optimizer: Any) -> Any:
        raise ValueError("no schedule")

    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="no schedule"):
        start(model, optimizer, config_of(3), lr_scheduler=fails)
    assert layer.weight is weight and weight.qdata is qdata and list(layer._parameters) == names
    assert any(p is weight for p in optimizer.param_groups[0]["params"])
    start(model, optimizer, config_of(3))
    assert "weight" not in layer._parameters and layer.weight is weight


def with_memory(weight: torch.Tensor) -> Any:
    made = nn.Parameter(weight.detach(), requires_grad=False)
    made.__class__ = type("Int8Params", (nn.Parameter,), {})
    made.CB = made.data  # type: ignore[attr-defined]
    return made


def test_compiled_blocks_of_weights_that_layers_assign_are_refused() -> None:
    model = stack()
    model.head.weight = with_memory(model.head.weight)
    with pytest.raises(ConfigError, match=r"compile\.blocks with head\.weight, a weight that its"):
        start(model, None, config_of(2, compile={"blocks": True}))


@on_each_rank(RANKS)
def test_the_memory_of_a_weight_among_its_attributes_is_the_weight(rank: int, model: Any) -> None:
    """The int8 layers of bitsandbytes compute with it."""

    class Int8Params(nn.Parameter):
        CB: Any

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            made = Int8Params(copy.deepcopy(self.data, memo), requires_grad=False)
            made.CB = copy.deepcopy(self.CB, memo)
            return made

    class State:
        CB: Any

    inner = Int8Params(model.head.weight.detach(), requires_grad=False)
    inner.CB = inner.data
    model.head.weight, model.head.state = inner, State()
    model.head.state.CB = inner.data
    want = inner.detach().clone()
    engine = start(model, adam(model), config_of(3, zero_optimization=SHARDED))
    assert inner.CB is inner and model.head.state.CB is inner
    with hf_zero.GatheredParameters([inner]):
        assert torch.equal(inner, want)
        other = copy.deepcopy(inner)
        assert type(other) is Int8Params and torch.equal(other.CB, want)
        made = inner.to(torch.float64, copy=True)
        assert type(made) is torch.Tensor and made.dtype == torch.float64
    engine.destroy()


def in_columns(weight: Any) -> Any:
    weight.qdata = weight.qdata.t().contiguous().t()
    return weight


@in_turn("change", [in_columns, lambda weight: nn.Parameter(weight, requires_grad=True)])
def test_parts_that_cannot_be_laid_out_are_refused(change: Callable[[Any], Any]) -> None:
    model = build()()
    layer = model.blocks[0].up.base_layer
    layer.weight = change(layer.weight)
    with pytest.raises(PartitionError, match=r"weight is a RowsOfBytes, whose memory cannot be"):
        start(model, None, config_of(3))
    assert isinstance(layer._parameters["weight"], RowsOfBytes)
