"""Compressed collectives under the ways people train: what a run comes to stays beside the dense
one's, all ranks hold the same, and a checkpoint goes on without them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.planning.needs import needs
from tests.helpers.engines import OnEngine, config_of, full_weights, start
from tests.helpers.models import ARCHITECTURES, Stack, seeded
from tests.helpers.plans import planned
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import on_ranks, squared
from tests.helpers.training import At, Job, Plan, adamw, plain_sgd, train
from tests.helpers.ways import WAYS

BLOCK = {"block_size": 32}
UP: dict[str, Any] = {"zero_quantized_gradients": True}
BOTH: dict[str, Any] = {"compressed_communication": {"bits": 4, **BLOCK}}
WEIGHTS: dict[str, Any] = {"zero_quantized_weights": True}


def config(stage: int, plan: Plan | None, zero: Any, **more: Any) -> dict[str, Any]:
    made = config_of(stage, plan, **{"compressed_communication": BLOCK, **more})
    made["zero_optimization"].update(stage3_param_persistence_threshold=0, **zero)
    return made


def moved(job: Job, plan: Plan, stage: int, zero: Any, more: Any) -> list[Any]:
    """By how much the weights have moved, and the values that each rank computes with."""

    def run(rank: int, models: Any) -> Any:
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
        for number in range(3):
            engine.backward(squared(engine, At(number, 0, rank)))
            engine.step()
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
        for number in range(3):
            engine.backward(squared(engine, At(number, 0, rank), plan.dtype))
            engine.step()
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
        engine.backward(squared(engine, At(3, 0, rank), plan.dtype))
        engine.step()
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
        for number in range(3):
            engine.backward(squared(engine, At(number, 0, rank)))
            engine.step()
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
        for number in range(3):
            engine.backward(squared(engine, At(number, 0, rank)))
            engine.step()
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
        engine.backward(squared(engine, At(0, 0, rank), plan.dtype))
        engine.step()
        return engine.bytes_by_tier()["device"]

    build = lambda: seeded(lambda: Stack(6, 48))  # noqa: E731
    said = needs(planned(build(), wanted, 2))
    apart = ("gathered units", "gradients under way")
    device = sum(part.nbytes for part in said.device if part.what not in apart)
    for found in on_ranks(2, run, build=build):
        assert found == pytest.approx(device, rel=0.03)
