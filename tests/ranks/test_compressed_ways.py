"""Compressed collectives under the ways people train, beside dense ones: runs, losses of a small
language model on real text, checkpoints that go on without them; errors of gradients in four bits
that are fed back (LoCo).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.compression.error_feedback import ErrorCodec
from hf_zero.ops.symmetric_blocks import BlockCodec, SymmetricBlocks
from hf_zero.planning.needs import needs
from tests.helpers.engines import OnEngine, config_of, full_weights, start
from tests.helpers.models import ARCHITECTURES, Stack, seeded
from tests.helpers.plans import planned
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import on_each_rank, on_ranks, run_steps, squared
from tests.helpers.training import At, Plan, adamw, plain_sgd, train
from tests.helpers.ways import WAYS

BLOCK = {"block_size": 32}
UP: dict[str, Any] = {"zero_quantized_gradients": True}
BOTH: dict[str, Any] = {"compressed_communication": {"bits": 4, **BLOCK}}
WEIGHTS: dict[str, Any] = {"zero_quantized_weights": True}


def config(stage, plan, zero, **more):
    made = config_of(stage, plan, **{"compressed_communication": BLOCK, **more})
    made["zero_optimization"].update(stage3_param_persistence_threshold=0, **zero)
    return made


def moved(job, plan, stage, zero, more):
    """By how much the weights have moved, and the values that each rank computes with."""

    def run(rank, models):
        model = models[rank]
        optimizer = plain_sgd(model)
        engine = start(model, optimizer, config(stage, plan, zero, **more))
        codecs = [flat for flat in engine.flats if flat.spec.reduce_codec is not None]
        assert bool(codecs) == bool(
            zero.get("zero_quantized_gradients") or "compressed_communication" in more
        )
        session, before = OnEngine(engine, plan), full_weights(engine)
        train(session, job, plan, rank)
        after = full_weights(engine)
        whole = [flat.full.clone() for flat in engine.flats if not flat.sharded]
        session.close()
        return {name: after[name] - before[name] for name in after}, whole

    models = [job.build() for _ in range(plan.ranks)]
    return run_ranks(plan.ranks, run, models)


@pytest.mark.parametrize(
    ("way", "stage", "zero", "more"),
    [
        ("frozen parameters inside blocks, and a block frozen whole", 3, {**UP, **WEIGHTS}, {}),
        ("a block called three times, with others in between", 3, {**UP, **WEIGHTS}, {}),
        ("non-reentrant checkpoint around each block", 3, {**UP, **WEIGHTS}, {}),
        ("each rank skips another block, by step", 3, {**UP, **WEIGHTS}, {}),
        ("a part of the model alone: GPT-2's body, then its tied head by hand", 2, {}, BOTH),
        ("each rank skips another block, by step", 2, {}, BOTH),
        ("a block never used", 1, {}, BOTH),
        ("frozen parameters inside blocks, and a block frozen whole", 1, UP, {}),
    ],
    ids=str,
)
def test_a_run_stays_beside_the_dense_one(way, stage, zero, more):
    plan, job = Plan(ranks=2, steps=3, accumulation=2), WAYS[way]
    dense = moved(job, plan, stage, {}, {})
    ours = moved(job, plan, stage, zero, more)
    assert all(torch.equal(a, b) for a, b in zip(ours[0][1], ours[1][1])) or stage == 3
    (found, _), (wanted, _) = ours[0], dense[0]
    off = sum(float((found[name] - wanted[name]).square().sum()) for name in wanted)
    size = sum(float(wanted[name].square().sum()) for name in wanted)
    assert 1e-4 < (off / size) ** 0.5 < 0.3, "int4 blocks of 32 are wrong by a twentieth"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_optimizer_may_be_offloaded(stage):
    """Gradients go up in few bits; new weights leave the host as they are."""
    zero = {"offload_optimizer": {"device": "cpu"}, **(UP if stage == 3 else {})}
    more = {} if stage == 3 else BOTH

    def run(rank, model, section, extra):
        engine = start(model, adamw(model), config(stage, Plan(), section, **extra))
        run_steps(engine, rank, range(3))
        up = [flat for flat in engine.flats if flat.spec.reduce_codec is not None]
        assert up and not any(flat.spec.sends_differences for flat in engine.flats)
        weights = full_weights(engine)  # waits for the update
        whole = [flat for flat in engine.flats if not flat.sharded]
        views = {n: view.clone() for flat in whole for n, view in flat.views.items()}
        return weights, views

    (offloaded, seen), (_, others) = on_ranks(2, run, zero, more)
    here = {"zero_quantized_gradients": True}
    (resident, _), _ = on_ranks(2, run, here, {})
    for name, weight in resident.items():
        torch.testing.assert_close(offloaded[name], weight, rtol=1e-4, atol=1e-6)
        if stage < 3:
            assert torch.equal(seen[name], others[name])
            assert torch.equal(seen[name].float(), offloaded[name])


def test_a_checkpoint_goes_on_without_compression_and_on_other_ranks(tmp_path):
    """Masters are saved and loaded as they are; after a load all ranks have them rounded."""
    plan = Plan(precision="bf16")

    def first(rank, model):
        engine = start(model, adamw(model), config(2, plan, {}, **BOTH))
        run_steps(engine, rank, range(3))
        engine.save_checkpoint(tmp_path, tag="here")
        return full_weights(engine)

    def then(rank, model, stage, more):
        engine = start(model, adamw(model), config(stage, plan, {}, **more))
        engine.load_checkpoint(tmp_path, tag="here")
        loaded = full_weights(engine)
        for flat in engine.flats:
            if not flat.sharded:
                own = flat.optimizer_shard.master
                assert torch.equal(flat.shard, own.to(flat.dtype))
        run_steps(engine, rank, [3])
        return loaded

    saved = on_ranks(2, first)[0]
    for ranks, stage, more in ((4, 2, BOTH), (3, 3, {}), (1, 1, {})):
        for loaded in on_ranks(ranks, then, stage, more):
            assert saved.keys() == loaded.keys()
            assert all(torch.equal(saved[name], loaded[name]) for name in saved)


def test_every_optimizer_that_is_elementwise_and_what_is_said(caplog):
    """One line in the log names codecs and bytes; SGD's momentum trains like AdamW does."""
    caplog.set_level("INFO", logger="hf_zero")

    def run(rank, model, optimizer):
        engine = start(model, optimizer(model), config(1, Plan(), {}, **BOTH))
        run_steps(engine, rank, range(3))
        return [flat.full.clone() for flat in engine.flats]

    for optimizer in (
        lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        lambda model: hf_zero.optim.Lion(model.parameters(), lr=1e-3),
    ):
        one, other = on_ranks(2, run, optimizer, build=lambda: seeded(lambda: Stack(2)))
        assert all(torch.equal(a, b) for a, b in zip(one, other))
    said = [record.getMessage() for record in caplog.records]
    found = [text for text in said if text.startswith("compressed communication in ")]
    assert len(found) == 2, said
    assert "int4 blocks of 32" in found[0] and "differences in int4 blocks of 32" in found[0]
    assert "bytes instead of" in found[0]


def test_nothing_is_compressed_unasked():
    def run(rank, model):
        engine = start(model, adamw(model), config_of(2))
        return [(flat.key, flat.spec.reduce_codec, flat.spec.gather_codec) for flat in engine.flats]

    for flats in on_ranks(2, run):
        assert all(up is down is None and not key.endswith("|blocks") for key, up, down in flats)


def test_architectures_of_transformers_train_alike():
    """BERT with tied embeddings at stage 3: the loss falls as the dense one's does."""

    def run(rank, model, zero):
        architecture = ARCHITECTURES["bert"]
        engine = start(model, adamw(model), config(3, Plan(), zero))
        losses = []
        for number in range(6):
            loss = engine(**architecture.batch(number % 2, 0, rank)).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        return losses

    build = ARCHITECTURES["bert"].build
    dense = on_ranks(2, run, {}, build=build)
    ours = on_ranks(2, run, {**UP, **WEIGHTS}, build=build)
    for one, other in zip(dense, ours):
        assert one != other
        assert max(abs(a - b) for a, b in zip(one, other)) < 0.05


def test_replicas_hold_the_same():
    """Shards over two ranks, twice: what a shard group rounds, both replicas add up."""

    def run(rank, model, more):
        engine = start(model, plain_sgd(model), config(2, Plan(), {}, replicate_size=2, **more))
        before = full_weights(engine)
        run_steps(engine, rank, range(3))
        after = full_weights(engine)
        masters = [flat.optimizer_shard.master.clone() for flat in engine.flats]
        whole = [flat.full.clone() for flat in engine.flats]
        return {name: after[name] - before[name] for name in after}, masters, whole

    ours, dense = on_ranks(4, run, BOTH), on_ranks(4, run, {"compressed_communication": BLOCK})
    for _, _, whole in ours[1:]:
        assert all(torch.equal(a, b) for a, b in zip(whole, ours[0][2]))
    for rank in (0, 1):
        assert all(torch.equal(a, b) for a, b in zip(ours[rank][1], ours[rank + 2][1]))
    found, wanted = ours[0][0], dense[0][0]
    off = sum(float((found[name] - wanted[name]).square().sum()) for name in wanted)
    size = sum(float(wanted[name].square().sum()) for name in wanted)
    assert 1e-4 < (off / size) ** 0.5 < 0.3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_memory_of_masters_is_foreseen(precision):
    """In fp32, too, they are others than the weights that all ranks have."""
    plan = Plan(precision=precision)
    wanted = config(2, plan, {}, **BOTH)

    def run(rank, model):
        engine = start(model, adamw(model), wanted)
        run_steps(engine, rank, [0])
        return engine.bytes_by_tier()["device"]

    build = lambda: seeded(lambda: Stack(6, 48))  # noqa: E731
    said = needs(planned(build(), wanted, 2))
    apart = ("gathered units", "gradients under way")
    device = sum(part.nbytes for part in said.device if part.what not in apart)
    for found in on_ranks(2, run, build=build):
        assert found == pytest.approx(device, rel=0.03)


TEXT = Path(__file__).resolve().parents[2] / "hf_zero"
WIDTH, LENGTH, ROWS, STEPS, LAST = 64, 64, 4, 200, 40
BITS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "dense": (2, {}, {}),
    "4 bits both ways": (2, {}, {"compressed_communication": {"bits": 4}}),
    "stage 3, 4 bits up, 8 down": (
        3,
        {"zero_quantized_gradients": True, "zero_quantized_weights": True},
        {},
    ),
    "4 bits up, a scale for 1024, errors fed back": (
        2,
        {"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8}},
        {"compressed_communication": {"block_size": 1024}},
    ),
}


class Language(nn.Module):
    """A transformer of two layers over bytes; returns the loss of the next byte."""

    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 128)
        for table in (self.embed, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, text):
        given, wanted = text[:, :-1], text[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        x = self.embed(given) + self.places.weight
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), wanted.flatten())


def losses(way, ranks, data):
    """The mean over the last steps and all ranks."""
    stage, zero, more = BITS[way]

    def run(rank, model):
        config = config_of(stage, Plan(), **more)
        config["zero_optimization"].update(stage3_param_persistence_threshold=0, **zero)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.99))
        engine, seen = start(model, optimizer, config), []
        generator = torch.Generator().manual_seed(rank)
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (step + 1) / 24)
            places = torch.randint(len(data) - LENGTH - 1, (ROWS,), generator=generator)
            loss = engine(torch.stack([data[at : at + LENGTH + 1] for at in places.tolist()]))
            engine.backward(loss)
            engine.step()
            seen.append(float(loss.detach()))
        return sum(seen[-LAST:]) / LAST

    models = [seeded(Language) for _ in range(ranks)]
    # half a minute of one core, and as much longer as others have it
    return sum(run_ranks(ranks, lambda rank: run(rank, models[rank]), timeout=900)) / ranks


@pytest.mark.long
def test_the_loss_is_that_of_dense_training():
    text = "".join(path.read_text() for path in sorted(TEXT.glob("*/README.md")))
    data = torch.tensor([byte for byte in text.encode() if byte < 128])
    dense = losses("dense", 2, data)
    assert dense < 3.2, "it learns"
    for way in list(BITS)[1:]:
        assert abs(losses(way, 2, data) - dense) < 0.03, way


LOCO_BLOCK, BETA = 32, 0.8


def loco(stage, plan=None, **more):
    loco = {"err_beta": BETA, "reset_T": 3}
    made = config_of(stage, plan, compressed_communication={"block_size": LOCO_BLOCK}, **more)
    made["zero_optimization"].update(
        zero_quantized_gradients=True, zeropp_loco_param=loco, stage3_param_persistence_threshold=0
    )
    return made


def codecs(engine):
    found = [flat.spec.reduce_codec for flat in engine.flats]
    return [codec for codec in found if isinstance(codec, ErrorCodec)]


def held(codec, numel):
    """The error of a codec of ``numel`` elements."""
    out = torch.zeros(numel)
    if codec.error is not None:
        codec._blocks.dequantise(codec.error, out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3])
def test_messages_and_errors_are_those_of_the_equations(dtype, rows):
    torch.manual_seed(0)
    plain = BlockCodec(SymmetricBlocks(4, LOCO_BLOCK))
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


def lossy(plain, numel, rows, dtype):
    """Return the norm of the error of the same sum without error feedback."""
    torch.manual_seed(0)
    lost = torch.zeros(numel)
    for _ in range(20):
        values, said = torch.randn(numel).to(dtype), torch.empty(numel)
        plain.decode(plain.encode(values, rows), said)
        lost += values.float() - said
    return float(lost.norm())


def step(engine, number, rank, dtype, times=1.0):
    engine.backward(squared(engine, At(number, 0, rank), dtype) * times)
    engine.step()


@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (2, 3), (3, 2)])
def test_errors_are_cleared_by_steps(stage, ranks):
    """And by a load: the file has none of them."""

    def run(rank, model, folder=None):
        engine = start(model, adamw(model), loco(stage))
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
    engine = start(model, adamw(model), loco(stage, plan))
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
    made = loco(2, fp16=section)
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
    engine = start(model, adamw(model), loco(2, plan))
    before = engine.state_bytes()["gradients"]
    step(engine, 0, rank, plan.dtype)
    more = engine.state_bytes()["gradients"] - before
    flats = [flat for flat in engine.flats if isinstance(flat.spec.reduce_codec, ErrorCodec)]
    numel = sum(flat.layout.padded for flat in flats)
    assert numel * (1 + 2 / LOCO_BLOCK) <= more < 1.1 * numel * (1 + 2 / LOCO_BLOCK)
    dense = loco(2, plan)
    del dense["zero_optimization"]["zeropp_loco_param"]
    rows = [
        hf_zero.estimate(engine.module, 2, config=each).at(2) for each in (loco(2, plan), dense)
    ]
    foreseen = rows[0].gradients - rows[1].gradients
    assert rows[0].tiers.device - rows[1].tiers.device == foreseen
    assert abs(foreseen - more) < 0.1 * more


def test_bits_of_both_directions_take_it_too():
    def run(rank, model):
        made = loco(2)
        made["compressed_communication"]["bits"] = 4
        del made["zero_optimization"]["zero_quantized_gradients"]
        engine = start(model, adamw(model), made)
        step(engine, 0, rank, torch.float32)
        assert codecs(engine) and all(codec.error is not None for codec in codecs(engine))
        whole = [flat for flat in engine.flats if not flat.sharded]
        return {name: view.clone() for flat in whole for name, view in flat.views.items()}

    one, other = on_ranks(2, run)
    assert all(torch.equal(one[name], other[name]) for name in one)
