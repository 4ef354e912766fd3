"""Weights of float8 linear layers that are gathered in float8, beside layers that cast gathered
weights, and beside one plain process. The layers are torchao's: ``pip install hf-zero[torchao]``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.errors import ConfigError, PartitionError
from hf_zero.zero.layout.flat_layout import FlatLayout
from hf_zero.zero.layout.float8_weights import FLOAT8, LARGEST, Float8Weights, is_float8, scales_of
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, run_steps, squared, stack
from tests.helpers.training import At, Plan, adamw, sgd
from tests.ranks.test_quantized_linears import distance, needs_torchao

SCALES = "scales of float8 weights"


def keys(gathers: bool, plan: Plan, zero: dict[str, Any] | None = None, **more: Any) -> Any:
    sharded = {"stage": 3, "stage3_param_persistence_threshold": 0, **(zero or {})}
    section = {"recipe": "tensorwise", "emulate": True, "gather_weights": gathers}
    return config_of(3, plan, zero_optimization=sharded, float8_training=section, **more)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [0.0, 1e-14, 1e-6, 0.02, 1.0, 1e30])
def test_a_cast_of_what_arrives_has_the_bytes_that_were_sent(dtype, size):
    def cast_in_one(weight):
        scale = (LARGEST / weight.abs().max().double().clamp(min=1e-12)).float()
        scaled = (weight.float() * scale).clamp(-LARGEST, LARGEST)
        return scaled.to(FLOAT8).view(torch.uint8), scale

    layout = FlatLayout.build([("a", (64, 80)), ("b", (3, 7)), ("none", (0, 5))], 3)
    whole = torch.randn(layout.padded, generator=torch.Generator().manual_seed(3)).mul(size)
    whole = whole.to(dtype)
    codecs = [Float8Weights(layout, layout.rank_range(shard)) for shard in range(3)]
    chunks = whole.chunk(3)
    amax = torch.stack([c.amax(chunk, c._owned[0]) for c, chunk in zip(codecs, chunks)]).amax(0)
    for codec in codecs:
        codec.set_scales(*scales_of(amax))
    messages = torch.cat([codec.encode(chunk) for codec, chunk in zip(codecs, chunks)])
    assert messages.nbytes == layout.padded
    again = Float8Weights(layout, layout.rank_range(1)).encode(whole, 3)  # needs no agreement
    out = torch.full_like(whole, float("nan"))
    codecs[0].decode(messages, out)
    for slot in layout.slots[:2]:
        here = slice(slot.offset, slot.end)
        bytes_of, scale = cast_in_one(whole[here])
        assert torch.equal(messages.view(-1)[here], bytes_of)
        assert torch.equal(again.view(-1)[here], bytes_of)
        got, its_scale = cast_in_one(out[here])
        assert torch.equal(got, bytes_of) and torch.equal(scale, its_scale)


BF16 = Plan(precision="bf16")


@needs_torchao
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_stays_beside_one_plain_process(ranks):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def converted() -> nn.Module:
        model = stack()
        recipe = Float8LinearConfig(emulate=True)
        inside = {f"blocks.{n}.{name}" for n in range(3) for name in ("up", "down")}
        convert_to_float8_training(
            model, config=recipe, module_filter_fn=lambda _, name: name in inside
        )
        return model

    def run(rank: int, model: Any) -> Any:
        engine = start(model, sgd(model), keys(True, Plan()))
        run_steps(engine, rank, range(4))
        return full_weights(engine)

    want, _ = by_hand(sgd, [[(1.0, 0)]] * 4, ranks, build=converted)
    plain, _ = by_hand(sgd, [[(1.0, 0)]] * 4, ranks)
    for found in on_ranks(ranks, run):
        for name, value in want.items():
            assert distance(found[name], value) < 1e-5, name
    assert distance(want["blocks.0.up.weight"], plain["blocks.0.up.weight"]) > 1e-5


@needs_torchao
@on_each_rank(2)
def test_bytes_and_messages(rank, model):
    """Half the bytes of bf16, and one message a step for all scales."""
    engine = start(model, adamw(model), keys(True, Plan(precision="bf16", accumulation=2)))
    coded = [flat for flat in engine.flats if flat.key.endswith("|float8")]
    assert sorted(name for flat in coded for name in flat.parameters) == sorted(
        f"blocks.{n}.{name}.weight" for n in range(3) for name in ("up", "down")
    )
    # their shards are casts of the master weights, as in gathers of bf16
    assert all(flat.cast_master is not None for flat in engine.flats)
    stats = engine.mesh.stats
    run_steps(engine, rank, range(2), 2)
    stats.keep_log = True
    stats.log.clear()
    run_steps(engine, rank, range(2, 4), 2)
    gathers = [(key, nbytes) for kind, key, nbytes in stats.log if kind == "all_gather"]
    assert Counter(key for key, _ in gathers)[SCALES] == 2
    assert dict(gathers)[SCALES] == 2 * 4 * 6  # ranks, bytes, weights
    units = {unit.label: unit for unit in engine.units}
    for key, nbytes in gathers:
        if key != SCALES:
            flats = units[key].sharded
            sizes = [flat.layout.padded * (1 if flat in coded else 2) for flat in flats]
            assert nbytes == sum(sizes)
    order = [key for _, key, _ in stats.log]  # a message in the pass itself could deadlock
    assert order[0] == SCALES
    stats.log.clear()
    engine.eval()
    with torch.no_grad():
        for step in range(2):
            squared(engine, At(step, 0, rank), torch.bfloat16)
    assert [key for _, key, _ in stats.log].count(SCALES) == 1


@needs_torchao
@on_each_rank(2)
def test_a_write_in_a_forward_is_refused(rank, model):
    """It would keep the other elements of the weight in float8."""
    engine = start(model, adamw(model), keys(True, BF16))

    def writes(module: Any, args: Any) -> None:
        with torch.no_grad():
            module.weight[0, 0] = 3.0

    model.blocks[1].up.register_forward_pre_hook(writes)
    with pytest.raises(
        PartitionError, match=r"weights sent in float8 with a scale for each weight"
    ):
        run_steps(engine, rank, [0])


@needs_torchao
@in_turn(
    ("change", "message"),
    [
        ({"float8_training": {"recipe": "rowwise", "emulate": True, "gather_weights": True}},
         r"gather_weights needs float8_training\.recipe = 'tensorwise'.* not 'rowwise'; change"),
        ({"float8_training": {"gather_weights": True}}, "not None; change the recipe, or remove"),
        ({"zero_optimization": {"stage": 2}}, r"which stage 2 does not have; write .*stage: 3"),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": True}}, "fp16 has no room for the small"),
        ({"quantize_training": {"enabled": True}}, "gather_weights and quantize_training both"),
    ],
)  # fmt: skip
def test_refusals(change, message):
    with pytest.raises(ConfigError, match=message):
        start(stack(), None, keys(True, BF16) | change)
    assert not any(map(is_float8, stack().parameters()))


@needs_torchao
def test_without_linear_layers_in_blocks():
    with pytest.raises(ConfigError, match=r"float8_training .* this model has none there"):
        start(nn.Sequential(nn.Linear(7, 5)), None, keys(True, BF16))
