"""QLoRA over bitsandbytes' 4-bit layers at every stage against the same model in one process. Runs
where bitsandbytes is installed: ``pip install bitsandbytes``.
"""

import peft
import pytest
import torch

import hf_zero
from hf_zero.distributed import process_group
from hf_zero.zero.layout.attributes import AttachedParameter
from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import Stack
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, run_steps
from tests.ranks.test_quantised import adam, adapters, alike

bnb = pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")

RANKS, STEPS, WIDTH = 2, 3, 192


@pytest.fixture(autouse=True)
def one_process():
    yield
    process_group.destroy_process_group()


def quantized(linear, nested, storage, kind):
    made = bnb.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        compress_statistics=nested,
        quant_type=kind,
        quant_storage=storage,
    )
    made.weight = bnb.nn.Params4bit(
        linear.weight.detach(),
        compress_statistics=nested,
        quant_type=kind,
        quant_storage=storage,
        module=made,
    ).to("cpu")
    made.bias = linear.bias
    return made


def build(nested=False, storage=torch.uint8, kind="nf4"):
    def made():
        with torch.random.fork_rng():
            torch.manual_seed(1234)
            model = Stack(width=WIDTH)
            for block in model.blocks:
                block.up = quantized(block.up, nested, storage, kind)
                block.down = quantized(block.down, nested, storage, kind)
            config = peft.LoraConfig(
                r=4, target_modules=["up", "down", "head"], init_lora_weights=False
            )
            return peft.get_peft_model(model, config).base_model.model

    return made


CASES = [
    (0, False, torch.uint8, "nf4"),
    (2, True, torch.uint8, "nf4"),
    (3, True, torch.uint8, "nf4"),
    (3, False, torch.bfloat16, "fp4"),
    (3, True, torch.float32, "nf4"),
]


@in_turn("stage, nested, storage, kind", CASES)
def test_the_numbers_are_those_of_one_process(stage, nested, storage, kind):
    made = build(nested, storage, kind)
    want, norms = by_hand(adam, [[(1.0, 0)]] * STEPS, RANKS, build=made)
    given = made().state_dict()

    def run(rank, model):
        engine = start(model, adam(model), config_of(stage))
        got = []
        for step in range(STEPS):
            run_steps(engine, rank, [step])
            got.append(engine.get_global_grad_norm())
        return full_weights(engine), got, engine.state_dict()

    for weights, got, state in on_ranks(RANKS, run, build=made):
        oracle.compare_tensors("weights", adapters(weights), adapters(want))
        assert got == pytest.approx(norms, rel=1e-5)
        assert set(state) == set(given)
        frozen = [name for name in given if "lora_" not in name]
        assert all(alike(state[name], given[name]) for name in frozen)


ALL_SHARDED = {"stage": 3, "stage3_param_persistence_threshold": 0}


@on_each_rank(RANKS, build=build(nested=True))
def test_scales_are_sharded_and_gathered_with_the_bytes(rank, model):
    weight = model.blocks[0].up.base_layer.weight
    scales = weight.quant_state.absmax.clone()
    elements = sum(
        block.get_submodule(name).base_layer.weight.quant_state.shape.numel()
        for block in model.blocks
        for name in ("up", "down")
    )
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    plain = sum(p.numel() for p in model.parameters() if type(p) is torch.nn.Parameter) - trained
    engine = start(model, adam(model), config_of(3, zero_optimization=ALL_SHARDED))
    held = weight.quant_state.absmax
    assert isinstance(held, AttachedParameter) and held.dtype == torch.uint8
    assert sum(engine.mesh.all_gather_object(held.ds_tensor.numel())) == scales.numel()
    assert weight.to("cpu") is weight
    with hf_zero.GatheredParameters([weight]):
        assert torch.equal(held, scales)
        assert weight.to("cpu") is weight, "PEFT puts it back after DoRA has read it"
    padding = 2 * RANKS * 256 * len(engine.flats)
    quantized, others = elements // 2 + elements // 64, 4 * (plain + trained)
    share = engine.state_bytes()["parameters"]
    assert (quantized + others) / RANKS <= share <= (quantized + others) / RANKS + padding
    for step in range(2):
        engine.mesh.stats.bytes.clear()
        run_steps(engine, rank, [step])
    # once for the forward, once more for the backward of all but the last unit
    moved = engine.mesh.stats.bytes["all_gather"]
    assert quantized + others <= moved <= 2 * (quantized + others) + 2 * padding
    assert quantized < 0.27 * 2 * elements, "a quarter of bf16, and the scales"


@on_each_rank(RANKS, build=build(nested=True))
def test_scales_of_a_weight_that_is_replaced_are_replaced(rank, model):
    engine = start(model, adam(model), config_of(3))
    engine.destroy(gather=True)
    layer = model.blocks[0].up.base_layer
    former = layer.weight.quant_state.absmax
    layer.weight = quantized(torch.nn.Linear(WIDTH, 2 * WIDTH), False, torch.uint8, "nf4").weight
    start(model, adam(model), config_of(3))
    names = [name for name in layer._parameters if name.startswith("weight.")]
    assert names == ["weight.absmax"] and layer._parameters["weight.absmax"] is not former
    assert layer._parameters["weight.absmax"] is layer.weight.quant_state.absmax
