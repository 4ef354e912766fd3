"""Compressed collectives beside dense ones: ways to call a model, offloaded optimizers, what is
said; errors of gradients in four bits that are fed back (LoCo).
"""

from __future__ import annotations

from typing import Any

import torch

import hf_zero
from hf_zero.compression.error_feedback import ErrorCodec
from hf_zero.ops.symmetric_blocks import BlockCodec, SymmetricBlocks
from tests.helpers.capabilities import ERRORS, FEW, FOUR, in_few_bits
from tests.helpers.cells import in_turn
from tests.helpers.engines import OnEngine, config_of, full_weights, start
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import on_each_rank, on_ranks, run_steps, squared
from tests.helpers.training import At, Plan, adamw, plain_sgd, train
from tests.helpers.ways import WAYS

UP: dict[str, Any] = {"zero_quantized_gradients": True}
PLUS: dict[str, Any] = {**UP, "zero_quantized_weights": True}
DENSE: dict[str, Any] = {"compressed_communication": FEW}


def config(stage, plan=None, zero=None, **more):
    return config_of(stage, plan, zero_optimization={"stage": stage, **(zero or {})}, **more)


def moved(job, plan, stage, zero, more):
    """The weights of each rank before and after a run, and the values that it computes with."""

    def run(rank, models):
        model = models[rank]
        engine = start(model, plain_sgd(model), config(stage, plan, zero, **{**DENSE, **more}))
        session, before = OnEngine(engine, plan), full_weights(engine)
        train(session, job, plan, rank)
        after = full_weights(engine)
        whole = [flat.full.clone() for flat in engine.flats if not flat.sharded]
        masters = [flat.optimizer_shard.master.clone() for flat in engine.flats if flat.trainable]
        session.close()
        return before, after, whole, masters

    models = [job.build() for _ in range(plan.ranks)]
    return run_ranks(plan.ranks, run, models)


@in_turn(
    ("way", "stage", "zero", "more"),
    [
        ("frozen parameters inside blocks, and a block frozen whole", 3, PLUS, {}),
        ("a block called three times, with others in between", 3, PLUS, {}),
        ("non-reentrant checkpoint around each block", 3, PLUS, {}),
        ("each rank skips another block, by step", 3, PLUS, {}),
        ("a part of the model alone: GPT-2's body, then its tied head by hand", 2, {}, FOUR),
        ("each rank skips another block, by step", 2, {}, FOUR),
        ("a block never used", 1, {}, FOUR),
        ("a block never used", 2, {}, {**FOUR, "replicate_size": 2}),
    ],
)
def test_a_run_stays_beside_the_dense_one(way, stage, zero, more):
    """Replicas add up what a shard group rounds, and hold the same."""
    replicas = more.get("replicate_size", 1)
    plan, job = Plan(ranks=2 * replicas, steps=3, accumulation=2), WAYS[way]
    dense = {key: value for key, value in more.items() if key == "replicate_size"}
    (before, wanted, _, _), *_ = moved(job, plan, stage, {}, dense)
    ours = moved(job, plan, stage, zero, more)
    for _, _, whole, _ in ours[1:]:
        assert all(torch.equal(a, b) for a, b in zip(whole, ours[0][2])) or stage == 3
    if replicas == 2:
        for rank in (0, 1):
            assert all(torch.equal(a, b) for a, b in zip(ours[rank][3], ours[rank + 2][3]))
    in_few_bits(ours[0][1], wanted, before)


@in_turn("stage", [2, 3])
def test_the_optimizer_may_be_offloaded(stage):
    """Gradients go up in few bits; new weights leave the host as they are."""
    zero = {"offload_optimizer": {"device": "cpu"}, **(UP if stage == 3 else {})}
    more = {} if stage == 3 else FOUR

    def run(rank, model, section, extra):
        engine = start(model, adamw(model), config(stage, zero=section, **{**DENSE, **extra}))
        run_steps(engine, rank, range(3))
        up = [flat for flat in engine.flats if flat.spec.reduce_codec is not None]
        assert up and not any(flat.spec.sends_differences for flat in engine.flats)
        weights = full_weights(engine)  # waits for the update
        whole = [flat for flat in engine.flats if not flat.sharded]
        return weights, {n: view.clone() for flat in whole for n, view in flat.views.items()}

    (offloaded, seen), (_, others) = on_ranks(2, run, zero, more)
    (resident, _), _ = on_ranks(2, run, UP, {})
    for name, weight in resident.items():
        torch.testing.assert_close(offloaded[name], weight, rtol=1e-4, atol=1e-6)
        if stage < 3:
            assert torch.equal(seen[name], others[name])
            assert torch.equal(seen[name].float(), offloaded[name])


def test_a_load_rounds_the_weights_of_all_ranks(tmp_path):
    """Masters are saved and loaded as they are."""
    plan = Plan(precision="bf16")

    def run(rank, model, loads):
        engine = start(model, adamw(model), config(2, plan, **FOUR))
        if loads:
            engine.load_checkpoint(tmp_path)
            for flat in engine.flats:
                assert torch.equal(flat.shard, flat.optimizer_shard.master.to(flat.dtype))
        else:
            run_steps(engine, rank, range(3))
            engine.save_checkpoint(tmp_path)

    on_ranks(2, run, False)
    on_ranks(4, run, True)


def test_every_optimizer_that_is_elementwise_and_what_is_said(caplog):
    """One line in the log names codecs and bytes; nothing is compressed, or said, unasked."""
    caplog.set_level("INFO", logger="hf_zero")

    def run(rank, model, optimizer, keys):
        engine = start(model, optimizer(model), config_of(1, **keys))
        run_steps(engine, rank, range(3))
        codecs = [(flat.spec.reduce_codec, flat.spec.gather_codec) for flat in engine.flats]
        return [flat.full.clone() for flat in engine.flats], codecs

    for optimizer, keys in (
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), FOUR),
        (lambda model: hf_zero.optim.Lion(model.parameters(), lr=1e-3), FOUR),
        (adamw, {}),
    ):
        (one, codecs), (other, _) = on_ranks(2, run, optimizer, keys)
        assert all(torch.equal(a, b) for a, b in zip(one, other))
        assert any(up is not None for up, _ in codecs) == bool(keys)
    said = [record.getMessage() for record in caplog.records]
    found = [text for text in said if text.startswith("compressed communication in ")]
    assert len(found) == 2, said
    assert "differences in int4 blocks of 32" in found[0] and "bytes instead of" in found[0]


# ---- errors that are fed back ----

LOCO_BLOCK, BETA = FEW["block_size"], ERRORS["err_beta"]


def loco(stage, plan=None, **more):
    zero = {**UP, "zeropp_loco_param": ERRORS}
    return config(stage, plan, zero, **{**DENSE, **more})


def codecs(engine):
    found = [flat.spec.reduce_codec for flat in engine.flats]
    return [codec for codec in found if isinstance(codec, ErrorCodec)]


def held(codec, numel):
    """The error of a codec of ``numel`` elements."""
    out = torch.zeros(numel)
    if codec.error is not None:
        codec._blocks.dequantise(codec.error, out)
    return out


@in_turn("dtype, rows", [(torch.float32, 3), (torch.bfloat16, 1), (torch.float16, 3)])
def test_messages_and_errors_are_those_of_the_equations(dtype, rows):
    torch.manual_seed(0)
    plain = BlockCodec(SymmetricBlocks(4, LOCO_BLOCK))
    codec, numel = ErrorCodec(plain, BETA), rows * 80
    sent, wanted, unfed = torch.zeros(numel), torch.zeros(numel), torch.zeros(numel)
    for _ in range(20):
        values, before = torch.randn(numel).to(dtype), held(codec, numel)
        asked = values.to(torch.float32, copy=True)
        if codec.error is not None:
            codec._blocks.dequantise(codec.error, asked, add=True)
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


def step(engine, number, rank, dtype, times=1.0):
    engine.backward(squared(engine, At(number, 0, rank), dtype) * times)
    engine.step()


@in_turn(("stage", "ranks"), [(1, 2), (2, 3), (3, 2)])
def test_errors_are_cleared_by_steps(stage, ranks):
    """And by a load: the file has none of them."""

    def run(rank, model):
        engine = start(model, adamw(model), loco(stage))
        assert codecs(engine)
        for number in range(1, 8):
            step(engine, number, rank, torch.float32)
            assert all((codec.error is None) == (number % 3 == 0) for codec in codecs(engine))
        engine.refresh_params()
        assert all(codec.error is None for codec in codecs(engine))

    on_ranks(ranks, run)


@in_turn("stage", [1, 3])
@on_each_rank(2)
def test_an_overflow_on_one_rank_clears_the_errors_of_all(rank, model, stage):
    plan = Plan(precision="fp16", scale=16.0)
    engine = start(model, adamw(model), loco(stage, plan))
    step(engine, 0, rank, plan.dtype)
    assert all(codec.error is not None for codec in codecs(engine))
    step(engine, 1, rank, plan.dtype, float("inf") if rank else 1.0)
    assert engine.skipped_steps == 1
    assert all(codec.error is None for codec in codecs(engine))


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
        step(engine, engine.global_steps, rank, torch.float16)
    assert engine.loss_scale() == 32.0 and len(seen) == len(flats) > 0


def test_bits_of_both_directions_take_it_too():
    def run(rank, model):
        made = loco(2, **FOUR)
        del made["zero_optimization"]["zero_quantized_gradients"]
        engine = start(model, adamw(model), made)
        step(engine, 0, rank, torch.float32)
        assert codecs(engine) and all(codec.error is not None for codec in codecs(engine))
        whole = [flat for flat in engine.flats if not flat.sharded]
        return {name: view.clone() for flat in whole for name, view in flat.views.items()}

    one, other = on_ranks(2, run)
    assert all(torch.equal(one[name], other[name]) for name in one)
