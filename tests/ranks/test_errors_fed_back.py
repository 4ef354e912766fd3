"""Gradients in four bits whose errors are fed back (LoCo): the equations, when errors are cleared,
and what they are for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.compression.error_feedback import ErrorCodec
from hf_zero.ops.block_codec import BlockCodec
from hf_zero.ops.symmetric_blocks import SymmetricBlocks
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import Stack, seeded
from tests.helpers.stacks import on_each_rank, on_ranks, squared
from tests.helpers.training import At, Plan, adamw

BLOCK, BETA = 32, 0.8


def config(stage: int, plan: Plan | None = None, **more: Any) -> dict[str, Any]:
    loco = {"err_beta": BETA, "reset_T": 3}
    made = config_of(stage, plan, compressed_communication={"block_size": BLOCK}, **more)
    made["zero_optimization"].update(
        zero_quantized_gradients=True, zeropp_loco_param=loco, stage3_param_persistence_threshold=0
    )
    return made


def codecs(engine: Any) -> list[ErrorCodec]:
    found = [flat.spec.reduce_codec for flat in engine.flats]
    return [codec for codec in found if isinstance(codec, ErrorCodec)]


def held(codec: ErrorCodec, numel: int) -> torch.Tensor:
    """The error of a codec of ``numel`` elements."""
    out = torch.zeros(numel)
    if codec.error is not None:
        codec._blocks.dequantise(codec.error, out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3])
def test_messages_and_errors_are_those_of_the_equations(dtype, rows):
    torch.manual_seed(0)
    plain = BlockCodec(SymmetricBlocks(4, BLOCK))
    codec, numel = ErrorCodec(plain, BETA), rows * 80
    sent, wanted = torch.zeros(numel), torch.zeros(numel)
    for _ in range(20):
        values, before = torch.randn(numel).to(dtype), held(codec, numel)
        asked = values.to(torch.float32, copy=True)
        if codec.error is not None:
            codec._blocks.dequantise(codec.error, asked, add=True)
        torch.testing.assert_close(asked, values.float() + before)
        said, alone = torch.empty(numel), torch.empty(numel)
        codec.decode(codec.encode(values, rows), said)
        plain.decode(plain.encode(asked, rows), alone)
        assert torch.equal(said, alone)
        error = BETA * before + (1 - BETA) * (values.float() + before - said)
        assert float((held(codec, numel) - error).abs().max()) <= float(error.abs().max()) / 253
        sent, wanted = sent + said, wanted + values.float()
    # but for rounding of errors to int8, twenty times
    lost = held(codec, numel) / (1 - BETA)
    assert float((wanted - sent - lost).abs().max()) < 0.1 * float(lost.abs().max())
    assert float((wanted - sent).norm()) < 0.5 * lossy(plain, numel, rows, dtype)


def lossy(plain: BlockCodec, numel: int, rows: int, dtype: torch.dtype) -> float:
    """Return the norm of the error of the same sum without error feedback."""
    torch.manual_seed(0)
    lost = torch.zeros(numel)
    for _ in range(20):
        values, said = torch.randn(numel).to(dtype), torch.empty(numel)
        plain.decode(plain.encode(values, rows), said)
        lost += values.float() - said
    return float(lost.norm())


def step(engine: Any, number: int, rank: int, dtype: torch.dtype, times: float = 1.0) -> None:
    engine.backward(squared(engine, At(number, 0, rank), dtype) * times)
    engine.step()


@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (2, 3), (3, 2)])
def test_errors_are_cleared_by_steps(stage, ranks):
    """And by a load: the file has none of them."""

    def run(rank, model, folder=None):
        engine = start(model, adamw(model), config(stage))
        assert codecs(engine)
        for number in range(1, 7):
            step(engine, number, rank, torch.float32)
            assert all((codec.error is None) == (number % 3 == 0) for codec in codecs(engine))
        step(engine, 7, rank, torch.float32)
        engine.refresh_params()
        assert all(codec.error is None for codec in codecs(engine))

    on_ranks(ranks, run)


@pytest.mark.parametrize("stage", [1, 3])
@on_each_rank(2)
def test_an_overflow_on_one_rank_clears_the_errors_of_all(rank, model, stage):
    plan = Plan(precision="fp16", scale=16.0)
    engine = start(model, adamw(model), config(stage, plan))
    step(engine, 0, rank, plan.dtype)
    assert all(codec.error is not None for codec in codecs(engine))
    before = full_weights(engine)
    step(engine, 1, rank, plan.dtype, float("inf") if rank else 1.0)
    assert engine.skipped_steps == 1
    assert all(codec.error is None for codec in codecs(engine))
    step(engine, 2, rank, plan.dtype)
    after = full_weights(engine)
    assert all(torch.isfinite(after[name]).all() for name in after)
    assert any(not torch.equal(after[name], before[name]) for name in after)


@on_each_rank(2)
def test_errors_have_the_scale_of_the_gradients(rank, model):
    """The loss scale doubles after each step."""
    section = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1}
    made = config(2, fp16=section)
    engine = start(model.half(), adamw(model), made)
    flats = [flat for flat in engine.flats if isinstance(flat.spec.reduce_codec, ErrorCodec)]
    seen: list[torch.Tensor] = []
    for flat in flats:
        codec: Any = flat.spec.reduce_codec

        def rescale(factor, codec=codec, flat=flat):
            before = held(codec, flat.layout.padded)
            ErrorCodec.rescale(codec, factor)
            assert factor == 2.0 and float(before.abs().max()) > 0
            assert torch.equal(held(codec, flat.layout.padded), 2 * before)
            seen.append(before)

        codec.rescale = rescale
    while engine.loss_scale() == 16.0:
        assert engine.global_steps < 4
        step(engine, engine.global_steps, rank, torch.float16)
    assert engine.loss_scale() == 32.0 and len(seen) == len(flats) > 0


@on_each_rank(2, build=lambda: seeded(lambda: Stack(3, 64)))
def test_bytes_are_counted_and_foreseen(rank, model):
    plan = Plan(precision="bf16")
    engine = start(model, adamw(model), config(2, plan))
    before = engine.state_bytes()["gradients"]
    step(engine, 0, rank, plan.dtype)
    more = engine.state_bytes()["gradients"] - before
    flats = [flat for flat in engine.flats if isinstance(flat.spec.reduce_codec, ErrorCodec)]
    numel = sum(flat.layout.padded for flat in flats)
    assert numel * (1 + 2 / BLOCK) <= more < 1.1 * numel * (1 + 2 / BLOCK)
    dense = config(2, plan)
    del dense["zero_optimization"]["zeropp_loco_param"]
    rows = [
        hf_zero.estimate(engine.module, 2, config=each).at(2) for each in (config(2, plan), dense)
    ]
    foreseen = rows[0].gradients - rows[1].gradients
    assert rows[0].tiers.device - rows[1].tiers.device == foreseen
    assert abs(foreseen - more) < 0.1 * more


def test_bits_of_both_directions_take_it_too():
    def run(rank, model):
        made = config(2)
        made["compressed_communication"]["bits"] = 4
        del made["zero_optimization"]["zero_quantized_gradients"]
        engine = start(model, adamw(model), made)
        step(engine, 0, rank, torch.float32)
        assert codecs(engine) and all(codec.error is not None for codec in codecs(engine))
        whole = [flat for flat in engine.flats if not flat.sharded]
        return {name: view.clone() for flat in whole for name, view in flat.views.items()}

    one, other = on_ranks(2, run)
    assert all(torch.equal(one[name], other[name]) for name in one)
