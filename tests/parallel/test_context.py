"""Sequences whose tokens stay on the ranks of a ring, against one process."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

import hf_zero
from hf_zero.errors import ConfigError
from hf_zero.parallel.sequence.attention import DistributedAttention
from hf_zero.parallel.sequence.division import Division
from tests.helpers import oracle
from tests.helpers.causal_zoo import tiny
from tests.helpers.cells import in_one_item
from tests.helpers.engines import config_of, start
from tests.helpers.models import seeded
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.sequences import (
    Ranks,
    SequenceJob,
    gpt2,
    half_labelled,
    llama,
    packed,
    padded,
    plain,
    qwen3,
    train_on_threads,
)
from tests.helpers.training import At, Plan

CP2, CP4 = Ranks(1, context=2), Ranks(1, context=4)
DATA, HEADS, TENSOR = Ranks(1, 2, context=2), Ranks(2, context=2), Ranks(1, 1, 2, context=2)
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
uncached = partial(llama, use_cache=False)
windows = partial(qwen3, use_cache=False, **SLIDING)

JOBS = {
    "llama": SequenceJob(llama),
    "one head of keys": SequenceJob(partial(llama, kv_heads=1)),
    "packed": SequenceJob(uncached, packed),
    "padding, learned positions": SequenceJob(gpt2, padded),
    "labels of half": SequenceJob(llama, half_labelled),
    "packed windows": SequenceJob(windows, packed),
}
# name, ranks, stage, accumulation
CELLS = [
    ("llama", DATA, 2, 2),
    ("llama", TENSOR, 3, 1),
    ("one head of keys", CP4, 3, 1),
    ("packed", HEADS, 3, 1),
    ("padding, learned positions", CP2, 1, 1),
    ("labels of half", CP2, 3, 1),
    ("packed windows", CP4, 2, 1),
]


def check(job, ranks, stage, accumulation=1, **config):
    plan = Plan(ranks=ranks.data, steps=2, accumulation=accumulation)
    found, stats = train_on_threads(job, plan, ranks, stage, **config)
    oracle.compare(found, oracle.run(job, plan))
    return stats


@in_one_item(CELLS)
def test_as_in_one_process(cell):
    name, *rest = cell
    check(JOBS[name], *rest)


def test_bytes_of_a_step():
    """Keys and values go once around in the forward, and again in the backward, with gradients."""
    rows, layers, shared, width, tokens, steps = 2, 2, 2, 8, 16, 2
    element = rows * width * 4
    (found,) = {
        (each.counts["send_to_next"], each.bytes["send_to_next"])
        for each in check(JOBS["llama"], CP4, 3)
    }
    assert found == (
        steps * layers * 3 * 3,
        steps * layers * 9 * element * 2 * shared * tokens // 4,
    )
    planned = hf_zero.simulate(
        seeded(llama), 4, 3, "fp32", context_parallel=4, sequence_length=tokens, micro_batch=rows
    )
    foreseen = [each for each in planned.collectives if each.operation == "send_to_next"]
    assert steps * sum(each.nbytes for each in foreseen) == found[1]
    assert steps * sum(each.count for each in foreseen) == found[0]


OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
FEATURES = {
    "recomputed windows": (
        windows,
        packed,
        {"activation_checkpointing": {"blocks": True, "cpu_checkpointing": True}},
    ),
    "tiled MLPs, offload": (
        llama,
        padded,
        {"tiled_mlp": {"enabled": True, "shards": 3}, "zero_optimization": {"stage": 3, **OFFLOAD}},
    ),
}


@in_one_item(FEATURES)
def test_features_as_in_one_process(name):
    make, batch, config = FEATURES[name]
    check(SequenceJob(make, batch), CP2, 3, **config)


def test_a_model_that_has_eager_attention_alone():
    """An evaluation computes whole sequences."""
    make = partial(tiny, "gpt_oss")
    models, whole = [make() for _ in range(2)], make()

    def on_rank(rank):
        model = models[rank]
        engine = start(model, None, config_of(1, context_parallel_size=2))
        with torch.no_grad():
            loss = engine.eval()(**BATCH).loss
            with pytest.raises(ConfigError, match="computes parts alone; call the model in eval"):
                copy.deepcopy(model)(**BATCH)
            part = hf_zero.sequence_parallel().shard(BATCH)
            trained = hf_zero.sequence_parallel().mean_loss(
                engine.train()(**part).loss, part["labels"]
            )
        engine.destroy()
        assert model.config._attn_implementation == "eager"
        return float(loss), float(trained)

    expected = float(whole(**BATCH).loss.detach())
    for losses in run_ranks(2, on_rank):
        assert losses == pytest.approx([expected, expected], rel=1e-5)


# ---- refusals ----


def started(rank, models, **config):
    start(models[rank], None, config_of(1, **config))


def trained(rank, models, batch, **config):
    engine = start(models[rank], None, config_of(1, **config))
    engine.train()
    engine(**hf_zero.sequence_parallel().shard(batch))


BATCH = plain(At(0, 0, 0))
dropping = partial(gpt2, attn_pdrop=0.1)
BOTH_WAYS = partial(tiny, "roberta", pad_token_id=1, is_decoder=False)
CONTEXT = {"context_parallel_size": 2}
SPARSE = {"sparse_attention": {"mode": "fixed", "block": 16, "attention": "unidirectional"}}
REFUSED = {
    "divide": (llama, {"context_parallel_size": 3}, "context_parallel_size = 3 .*divide 2 ranks"),
    "both sizes": (
        llama,
        {**CONTEXT, "sequence_parallel_size": 2},
        "sequence_parallel_size = 2 and context_parallel_size = 2 does not divide 2 ranks",
    ),
    "soft caps": (partial(tiny, "gemma2"), CONTEXT, "soft-caps its scores; .*softcapping to None"),
    "state": (partial(tiny, "mamba"), CONTEXT, "layers of linear_attention; .*to 1"),
    "directions": (BOTH_WAYS, CONTEXT, "in both directions"),
    "sparse": (partial(llama, max_position_embeddings=256), {**CONTEXT, **SPARSE},
               "cannot split sparse_attention"),
    "blocks left out by each rank": (
        llama,
        {**CONTEXT, "progressive_layer_drop": {"enabled": True, "per_rank": True}},
        "the context parallel ranks compute each block together",
    ),
    "curriculum": (llama, {**CONTEXT, "training_phases": {"phases": [
        {"steps": 4, "sequence_length": 8}]}}, "shortens sequences"),
}  # fmt: skip


def refused(match, function, *args, **more):
    with pytest.raises(RankFailed, match=match) as raised:
        run_ranks(2, partial(function, **more), *args)
    assert isinstance(raised.value.__cause__, ConfigError)


@in_one_item(REFUSED)
def test_what_is_refused(name):
    make, config, match = REFUSED[name]
    refused(match, started, [seeded(make) for _ in range(2)], **config)


def test_what_a_forward_refuses():
    refused(
        "GPT2Attention drops out 0.1 of its attention, .*attn_pdrop",
        trained, [seeded(dropping) for _ in range(2)], BATCH, **CONTEXT,
    )  # fmt: skip
    short = {name: each[:, :14] for name, each in BATCH.items()}
    refused(
        "14 tokens do not divide .* context_parallel_size = 2; .*multiple of 4",
        trained, [seeded(llama) for _ in range(2)], short, **CONTEXT,
    )  # fmt: skip


def test_a_job_has_one_division():
    def twice(rank):
        hf_zero.sequence_parallel(context_parallel_size=2)
        assert hf_zero.sequence_parallel().division == Division(1, 2)
        with pytest.raises(ConfigError, match=r"groups of 2 \(context_parallel_size = 2"):
            hf_zero.sequence_parallel(2)
        with pytest.raises(ConfigError, match="context_parallel_size = 0 is not a number"):
            hf_zero.sequence_parallel(context_parallel_size=0)
        with pytest.raises(ConfigError, match="whole sequences, and with context_parallel_size"):
            DistributedAttention(torch.nn.Identity())

    run_ranks(2, twice)
