"""Collectives in few bits: what ranks that are threads compute is what the equations of
helpers/compressed.py give on whole vectors, and what travels is what they say; ways to call a model
and offloaded optimizers; errors of gradients in four bits that are fed back (LoCo).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import hf_zero
from hf_zero.compression.block_codecs import BlockCodec
from hf_zero.compression.error_feedback import ErrorCodec
from hf_zero.errors import KernelError, PartitionError
from hf_zero.ops.symmetric_blocks import SymmetricBlocks
from tests.helpers.capabilities_of_techniques import ERRORS, FEW, FOUR
from tests.helpers.cells import in_one_item, in_turn
from tests.helpers.compressed import (
    GRADIENTS,
    by_owner,
    check_gradients,
    compressible,
    config,
    sent_bytes,
    trained,
)
from tests.helpers.engines import start
from tests.helpers.models import Stack, seeded
from tests.helpers.stacks import on_each_rank, on_ranks, run_steps, squared
from tests.helpers.training import At, Plan, adamw

BLOCK = FEW["block_size"]


@in_turn(
    ("stage", "ranks", "plan", "block"),
    [
        (1, 3, Plan(steps=2, accumulation=2, precision="bf16"), None),
        (2, 2, Plan(steps=2, accumulation=2, clip=0.1), 64),
        (3, 3, Plan(steps=2, precision="fp16", scale=16.0), 32),
        (2, 1, Plan(steps=1), 256),
    ],
)
def test_gradients_are_those_of_the_equations(stage, ranks, plan, block):
    """Bit for bit, from what autograd has left on each rank."""
    more = {"compressed_communication": {"block_size": block}}
    answers = on_ranks(ranks, trained, stage, plan, GRADIENTS, more)
    check_gradients(answers, stage, plan, block)


def test_differences_need_the_values_of_the_receivers():
    values, codec = torch.arange(64.0), BlockCodec(SymmetricBlocks(8, 64), differences=True)
    with pytest.raises(
        KernelError, match=r"differences in int8 blocks of 64 are taken .* `current`"
    ):
        codec.encode(values)
    out = values.clone()
    codec.decode(codec.encode(values + 1, current=values), out)
    torch.testing.assert_close(out, values + 1, rtol=0, atol=0.01)


@in_turn(("stage", "precision"), [(1, "fp32"), (3, "bf16")])
def test_bytes_of_every_message(stage, precision, monkeypatch):
    """At the process group: four bits an element and a scale of 16 for each 64."""
    sent, plan, world = sent_bytes(monkeypatch), Plan(precision=precision), 2

    def run(rank, model):
        engine = start(model, adamw(model), config(stage, plan, GRADIENTS))
        sent.clear()
        dist.barrier()
        stats = engine.mesh.stats
        stats.keep_log = True
        run_steps(engine, rank, [0])
        return [(flat.layout, flat.dtype) for flat in engine.flats], list(stats.log)

    answers = on_ranks(world, run, build=lambda: seeded(lambda: Stack(3, 64)))
    flats, log = answers[0]
    chosen = [layout for layout, _ in flats if compressible(layout)]
    wanted = sorted(
        world
        * (-(-layout.shard_numel // 32) * 16 + -(-2 * -(-layout.shard_numel // 64) // 16) * 16)
        for layout in chosen
    )
    for rank in range(world):
        found = sorted(size for name, size in sent[rank] if name == "all_to_all_single")
        assert found == wanted
    counted = sum(size for operation, _, size in log if operation == "reduce_scatter")
    scattered = sum(size for name, size in sent[0] if name.startswith("reduce_scatter"))
    assert counted == sum(wanted) + scattered
    dense = sum(layout.padded * dtype.itemsize for layout, dtype in flats if layout in chosen)
    assert sum(wanted) <= dense * (0.27 if precision == "bf16" else 0.135)


WEIGHTS = {"zero_quantized_weights": True}


def as_gathered(flat, values, block=None):
    """Return the values that ranks compute with after ``values`` [padded] are sent in 8 bits."""
    rounded = by_owner(values.float(), flat.layout.num_shards, 8, block)
    return rounded.to(flat.dtype) if compressible(flat.layout, block) else values


@on_each_rank(3)
def test_weights_are_gathered_in_8_bits_and_kept_as_they_are(rank, model):
    """Every rank, the owner too, computes with C(w); whoever asks gets full precision."""
    plan = Plan(precision="bf16")
    engine = start(model, adamw(model), config(3, plan, WEIGHTS))
    flats = {name: flat for flat in engine.flats for name in flat.layout.by_name}
    used: dict[str, torch.Tensor] = {}
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda module, args: used.update({module.weight_name: module.weight.clone()})
            )
    for name, module in model.named_modules():
        module.weight_name = f"{name}.weight"
    for number in range(2):
        shards = {flat: flat.whole_from_shards() for flat in engine.flats}
        engine.backward(squared(engine, At(number, 0, rank), plan.dtype))
        for name, weight in used.items():
            flat = flats[name]
            slot = flat.layout.by_name[name]
            want = as_gathered(flat, shards[flat])[slot.offset : slot.end]
            assert torch.equal(weight.reshape(-1), want), (number, name)
        engine.step()
    rounded = [flat for flat in engine.flats if compressible(flat.layout)]
    assert rounded and len(rounded) < len(engine.flats)
    for flat in rounded:
        whole = flat.whole_from_shards()
        assert not torch.equal(as_gathered(flat, whole), whole)
        for name, slot in flat.layout.by_name.items():
            exact, parameter = whole[slot.offset : slot.end], flat.parameters[name]
            engine.mesh.stats.counts.clear()
            with hf_zero.GatheredParameters([parameter]):
                assert engine.mesh.stats.counts["all_gather"] == 1
                assert torch.equal(parameter.detach().reshape(-1), exact)
            full = hf_zero.safe_get_full_fp32_param(parameter)
            assert torch.equal(full.reshape(-1).to(flat.dtype), exact)
    for name, value in engine.module.state_dict().items():
        slot, flat = flats[name].layout.by_name[name], flats[name]
        assert torch.equal(value.reshape(-1), flat.whole_from_shards()[slot.offset : slot.end])


@on_each_rank(2)
def test_a_write_inside_gathered_parameters_keeps_the_rest_exact(rank, model):
    engine = start(model, adamw(model), config(3, Plan(), WEIGHTS))
    run_steps(engine, rank, [0])
    weight = model.blocks[0].up.weight
    before = hf_zero.safe_get_full_fp32_param(weight).clone()
    engine.eval()
    with torch.no_grad():  # leaves units whole, in 8 bits
        squared(engine, At(1, 0, rank))
    with hf_zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight[0, 0] = 3.0
    engine.train()
    loss = squared(engine, At(1, 0, rank))  # the last block stays from here to its backward
    last = model.blocks[2].up.weight
    exact = hf_zero.safe_get_full_fp32_param(last)
    with hf_zero.GatheredParameters([last]):
        assert torch.equal(last, exact)
    engine.backward(loss)
    after = hf_zero.safe_get_full_fp32_param(weight)
    before[0, 0] = 3.0
    assert torch.equal(before, after)
    engine.step()
    with engine.sharded_model.gathered(
        engine.units[1]
    ):  # a unit that is pinned across a step is exact
        run_steps(engine, rank, [2])
        for flat in engine.units[1].sharded_flats:
            assert torch.equal(flat.full, flat.whole_from_shards())


@on_each_rank(2)
def test_a_write_to_rounded_weights_is_refused(rank, model):
    """Its other elements would be rounded for good."""
    engine = start(model, adamw(model), config(3, Plan(), WEIGHTS))
    block = model.blocks[1].up
    before = hf_zero.safe_get_full_fp32_param(block.weight).clone()

    def writes(module, args):
        with torch.no_grad():
            module.weight[0, 0] = 3.0

    hook = block.register_forward_pre_hook(writes)
    message = r"blocks\.1\.up\.weight was written .* weights sent in int8 blocks of 256, and what"
    with pytest.raises(PartitionError, match=message):
        run_steps(engine, rank, [0])
    hook.remove()
    assert torch.equal(hf_zero.safe_get_full_fp32_param(block.weight), before)
    run_steps(engine, rank, [1])


@in_turn(
    ("stage", "ranks", "plan"),
    [
        (1, 2, Plan(accumulation=2)),
        (2, 3, Plan(precision="fp16", scale=16.0, clip=0.05)),
    ],
)
def test_updates_are_differences_to_what_all_ranks_have(stage, ranks, plan, caplog):
    """xh = round(xh + C(x - xh)) bit for bit, from the masters of each step; it is logged once."""
    caplog.set_level("INFO", logger="hf_zero")
    caplog.clear()

    def run(rank, model):
        engine = start(model, adamw(model), config(stage, plan, **FOUR))
        steps = []
        for number in range(3):
            before = {flat.key: flat.full.clone() for flat in engine.flats}
            for micro in range(plan.accumulation):
                engine.backward(squared(engine, At(number, micro, rank), plan.dtype))
                engine.step()
            masters = {flat.key: flat.optimizer_shard.master.clone() for flat in engine.flats}
            after = {flat.key: flat.full.clone() for flat in engine.flats}
            steps.append((before, masters, after))
        return [(flat.key, flat.layout, flat.dtype) for flat in engine.flats], steps

    answers = on_ranks(ranks, run)
    flats, steps = answers[0]
    moved = 0
    for number, (before, _, after) in enumerate(steps):
        for key, layout, dtype in flats:
            for _, others in answers[1:]:
                assert torch.equal(after[key], others[number][2][key]), (number, key)
            x = torch.cat([other[number][1][key] for _, other in answers])
            xh = before[key].float()
            if compressible(layout, BLOCK):
                want = (xh + by_owner(x - xh, ranks, 4, BLOCK)).to(dtype)
                moved += int((after[key] != x.to(dtype)).sum())
                assert float((after[key].float() - x).norm()) < 0.05 * float(x.norm())
            else:
                want = x.to(dtype)
            assert torch.equal(after[key], want), (number, key)
    assert moved
    said = [record.getMessage() for record in caplog.records]
    (found,) = (text for text in said if text.startswith("compressed communication in "))
    assert f"differences in int4 blocks of {BLOCK}" in found and "bytes instead of" in found


def test_whole_weights_and_checkpoints_are_of_the_masters(tmp_path):
    """The weights that ranks compute with lag behind them; a load rounds them, on other ranks."""
    plan = Plan(precision="bf16")

    def save(rank, model):
        engine = start(model, adamw(model), config(2, plan, **FOUR))
        run_steps(engine, rank, range(2))
        engine.save_16bit_model(str(tmp_path), "model.safetensors")
        engine.save_checkpoint(str(tmp_path))
        fp32 = engine.consolidated(torch.float32)
        masters = {name: value.to(plan.dtype) for name, value in fp32}
        lagging = {name: value.detach().clone() for name, value in model.named_parameters()}
        whole = engine.state_dict(rank0_only=True)
        engine.destroy(gather=True)
        for name, value in model.named_parameters():
            assert torch.equal(value, masters[name]), name
        return masters, lagging, whole

    def load(rank, model):
        engine = start(model, adamw(model), config(2, plan, **FOUR))
        engine.load_checkpoint(str(tmp_path))
        for flat in engine.flats:
            assert torch.equal(flat.shard, flat.optimizer_shard.master.to(flat.dtype))

    masters, lagging, whole = on_ranks(2, save)[0]
    for found in (load_file(tmp_path / "model.safetensors"), whole):
        assert all(torch.equal(value, found[name]) for name, value in masters.items())
    assert any(not torch.equal(value, lagging[name]) for name, value in masters.items())
    on_ranks(3, load)


@on_each_rank(2)
def test_a_write_gives_the_masters_of_its_parameter_the_values_of_all_ranks(rank, model):
    """``safe_set_full_fp32_param`` sets the masters alone."""
    engine = start(model, adamw(model), config(2, Plan(precision="bf16"), **FOUR))
    run_steps(engine, rank, range(2))
    weight, other = model.blocks[0].up.weight, model.blocks[1].up.weight
    before = hf_zero.safe_get_full_fp32_param(other)
    with torch.no_grad():
        weight[0, 0] = 1.0
    assert torch.equal(hf_zero.safe_get_full_fp32_param(weight).bfloat16(), weight)
    assert torch.equal(hf_zero.safe_get_full_fp32_param(other), before)
    assert not torch.equal(before.bfloat16(), other)
    before[0, 0] = 1.0
    hf_zero.safe_set_full_fp32_param(other, before)
    assert torch.equal(hf_zero.safe_get_full_fp32_param(other), before)


BLOCKS_OF_32: dict[str, Any] = {"compressed_communication": FEW}


BETA = ERRORS["err_beta"]


def loco(stage, plan=None, up=GRADIENTS, **more):
    zero = {**up, "zeropp_loco_param": ERRORS}
    return config(stage, plan, zero, **{**BLOCKS_OF_32, **more})


def codecs(engine):
    found = [flat.spec.reduce_codec for flat in engine.flats]
    return [codec for codec in found if isinstance(codec, ErrorCodec)]


def held(codec, numel):
    """The error of a codec of ``numel`` elements."""
    out = torch.zeros(numel)
    if codec.error is not None:
        codec._blocks.dequantize(codec.error, out)
    return out


@in_turn("dtype, rows", [(torch.float32, 3), (torch.bfloat16, 1)])
def test_messages_and_errors_are_those_of_the_equations(dtype, rows):
    torch.manual_seed(0)
    plain = BlockCodec(SymmetricBlocks(4, BLOCK))
    codec, numel = ErrorCodec(plain, BETA), rows * 80
    sent, wanted, unfed = torch.zeros(numel), torch.zeros(numel), torch.zeros(numel)
    for _ in range(20):
        values, before = torch.randn(numel).to(dtype), held(codec, numel)
        asked = values.to(torch.float32, copy=True)
        if codec.error is not None:
            codec._blocks.dequantize(codec.error, asked, add=True)
        torch.testing.assert_close(asked, values.float() + before)
        said, alone, without = torch.empty(numel), torch.empty(numel), torch.empty(numel)
        codec.decode(codec.encode(values, rows), said)
        plain.decode(plain.encode(asked, rows), alone)
        plain.decode(plain.encode(values, rows), without)
        assert torch.equal(said, alone)
        error = BETA * before + (1 - BETA) * (values.float() + before - said)
        assert float((held(codec, numel) - error).abs().max()) <= float(error.abs().max()) / 253
        sent, wanted, unfed = sent + said, wanted + values.float(), unfed + without
    # but for rounding of errors to int8, twenty times
    lost = held(codec, numel) / (1 - BETA)
    assert float((wanted - sent - lost).abs().max()) < 0.1 * float(lost.abs().max())
    assert float((wanted - sent).norm()) < 0.5 * float((wanted - unfed).norm())


@in_one_item([math.nan, math.inf])
def test_no_error_is_left_of_what_is_not_finite(spoiled):
    """The message shows it; other blocks keep their errors."""
    codec, numel = ErrorCodec(BlockCodec(SymmetricBlocks(4, BLOCK)), BETA), 2 * 3 * BLOCK
    values = torch.randn(numel)
    values[5] = values[-BLOCK] = spoiled
    said = torch.empty(numel)
    codec.decode(codec.encode(values, 2), said)
    blocks, errors = said.view(6, BLOCK), held(codec, numel).view(6, BLOCK)
    assert blocks.isnan().all(1).tolist() == [True, *[False] * 4, True]
    assert errors.any(1).tolist() == [False, *[True] * 4, False] and errors.isfinite().all()


def one_step(engine, number, rank, dtype, times=1.0):
    engine.backward(squared(engine, At(number, 0, rank), dtype) * times)
    engine.step()


@in_turn("stage, up, more", [(1, GRADIENTS, {}), (3, GRADIENTS, {}), (2, {}, FOUR)])
@on_each_rank(2)
def test_errors_are_cleared(rank, model, stage, up, more):
    """By every third step, by a load, and on all ranks by an overflow on one."""
    plan = Plan(precision="fp16", scale=16.0)
    engine = start(model, adamw(model), loco(stage, plan, up, **more))

    def cleared():
        found = {codec.error is None for codec in codecs(engine)}
        assert len(found) == 1
        return found.pop()

    for number in range(1, 6):
        one_step(engine, number, rank, plan.dtype)
        assert cleared() == (number == 3)
        if number == 4:
            engine.refresh_params()
            assert cleared()
    one_step(engine, 6, rank, plan.dtype, float("inf") if rank else 1.0)
    assert engine.skipped_steps == 1 and cleared()


@on_each_rank(2)
def test_errors_have_the_scale_of_the_gradients(rank, model):
    """The loss scale doubles after each step."""
    section = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1}
    engine = start(model.half(), adamw(model), loco(2, fp16=section))
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
        one_step(engine, engine.global_steps, rank, torch.float16)
    assert engine.loss_scale() == 32.0 and len(seen) == len(flats) > 0


@on_each_rank(2)
def test_a_rebuild_keeps_the_scale_of_the_errors(rank, model):
    """A layer that begins to train: the errors begin anew, in the loss scale of now."""
    model.head.requires_grad_(False)
    section = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1000}
    optimizer = torch.optim.AdamW(model.half().parameters(), 1e-3)
    engine = start(model, optimizer, loco(2, fp16=section))
    engine.scaler.scale = 256.0
    one_step(engine, 0, rank, torch.float16)
    engine.module.head.requires_grad_(True)
    loss = squared(engine, At(1, 0, rank), torch.float16)  # its forward rebuilds
    scaled: list[float] = []
    rebuilt = list(codecs(engine))
    assert rebuilt
    for codec in rebuilt:
        codec.rescale = scaled.append
    engine.backward(loss)
    engine.step()
    assert engine.loss_scale() == 256.0 and not scaled
