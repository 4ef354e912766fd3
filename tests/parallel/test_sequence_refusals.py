"""Refusals of sequence parallelism; models that it leaves alone; ranks with other batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import hf_zero
from hf_zero.errors import ConfigError, RankMismatchError
from hf_zero.parallel.sequence.batches import cut
from hf_zero.parallel.sequence.division import Division
from tests.helpers.caches import cache_argument
from tests.helpers.causal_zoo import tiny
from tests.helpers.cells import in_one_item
from tests.helpers.engines import config_of, start
from tests.helpers.models import HEADS, HIDDEN, LAYERS, Stack, bert, seeded, t5
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.sequences import ROWS, TOKENS, Ranks, gpt2, llama, plain
from tests.helpers.training import At, sgd

ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
MODELS: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "bidirectional": (bert, 2, "attends in both directions"),
    "two sequences": (t5, 2, "it attends across two sequences"),
    "chunks": (partial(tiny, "llama4_text"), 2, "layers of chunked_attention"),
    "rotary": (partial(llama, rope_parameters=ROPE), 2, "rope_type"),
    "heads": (partial(llama, num_attention_heads=2), 4, "does not divide 2 attention heads"),
    "no transformer": (Stack, 2, "not Stack"),
}


def initialized(rank, models, size, config):
    model = models[rank]
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    try:
        start(model, None, config, mpu=hf_zero.sequence_parallel(size))
    finally:
        if before is not None:
            assert model.config._attn_implementation == before


def refused(match, ranks, *args):
    with pytest.raises(RankFailed, match=match) as raised:
        run_ranks(ranks, *args)
    assert isinstance(raised.value.__cause__, ConfigError)


@in_one_item(MODELS)
def test_models_that_cannot_be_split(kind):
    make, size, match = MODELS[kind]
    models = [seeded(make) for _ in range(size)]
    refused(match, size, initialized, models, size, config_of(1))


BATCH = plain(At(0, 0, 0))
ONES = torch.ones(ROWS, TOKENS, dtype=torch.int64)
COUNTED = torch.arange(TOKENS)
PACKED = BATCH | {"position_ids": torch.where(COUNTED < 6, COUNTED, COUNTED - 6)[None]}
PADDED = torch.where(torch.arange(TOKENS) < 10, ONES, 0)


BATCHES: list[tuple[Any, int, str]] = [
    ([ONES], 2, "not a list"),
    ({"x": ONES}, 2, "input_ids"),
    (BATCH, 3, "pad_to_multiple_of=3"),
    (BATCH | {"attention_mask": ONES.tril() * 0 + ONES.triu()}, 2, "padding on the left"),
    (BATCH | {"attention_mask": PADDED}, 2, r"labels\[attention_mask == 0\] = -100"),
    (PACKED | {"attention_mask": ONES}, 2, "at token 6, .* attention_mask"),
    (BATCH | {"attention_mask": ONES[:, None, None]}, 2, r"attention_mask of shape \[2, 1"),
    (BATCH | {"position_ids": ONES.expand(3, ROWS, TOKENS)}, 2, r"position_ids .*shape \[3, 2,"),
    (BATCH | {"position_ids": COUNTED.expand(3, -1)}, 2, r"position_ids .*shape \[3, 16\]"),
    (BATCH | {"position_ids": COUNTED}, 2, r"position_ids .*shape \[16\]"),
    (BATCH | {"labels": ONES[:, 0]}, 2, r"labels .*shape \[2\], .*input_ids .*\[2, 16\]"),
    (BATCH | {"labels": ONES.repeat(1, 2)}, 2, r"labels .*shape \[2, 32\]"),
    (BATCH | {"labels": ONES[:, :6]}, 2, r"labels .*shape \[2, 6\]"),
    (BATCH | {"labels": ONES.tolist()}, 2, "labels is a list"),
    (BATCH | {"shift_labels": ONES[:, 0]}, 2, r"shift_labels .*shape \[2\]"),
    (BATCH | {"attention_mask": ONES[:, 1:]}, 2, r"attention_mask .*shape \[2, 15\]"),
    (BATCH | {"attention_mask": ONES[:1]}, 2, r"attention_mask .*shape \[1, 16\]"),
    (BATCH | {"attention_mask": ONES.tolist()}, 2, "attention_mask is a list"),
    ({"input_ids": ONES[0], "labels": ONES[0]}, 2, r"input_ids is of shape \[16\]"),
    ({"input_ids": ONES.tolist()}, 2, "input_ids is a list"),
]


@in_one_item(BATCHES, lambda row: row[-1])
def test_batches_that_cannot_be_cut(row):
    batch, parts, match = row
    with pytest.raises(ConfigError, match=match):
        cut(batch, 0, Division(parts))


def test_inputs_that_are_none_are_left_out():
    """Embeddings in place of ids, and one row of positions for all."""
    embedded = torch.randn(ROWS, TOKENS, HIDDEN)
    batch = {"input_ids": None, "inputs_embeds": embedded, "labels": BATCH["labels"]}
    part = cut({**batch, "position_ids": COUNTED[None]}, 1, Division(2))
    assert part["input_ids"] is None and torch.equal(part["inputs_embeds"], embedded[:, 8:])
    assert part["labels"].shape == part["position_ids"].shape == (ROWS, TOKENS // 2)


def test_a_batch_is_cut_after_its_labels_are_shifted():
    """Beside a mask positions are ``mask.cumsum(1) - 1``, with any value for padding."""
    labels = BATCH["labels"].masked_fill(PADDED == 0, -100)
    batch = BATCH | {"attention_mask": PADDED, "labels": labels, "count": 3}
    parts = [cut(batch, part, Division(2)) for part in (0, 1)]
    whole = {
        name: torch.cat([part[name] for part in parts], 1) for name in parts[0] if name != "count"
    }
    assert torch.equal(whole["input_ids"], BATCH["input_ids"])
    assert torch.equal(whole["shift_labels"][:, :-1], labels[:, 1:])
    assert bool((whole["shift_labels"][:, -1] == -100).all())
    assert torch.equal(whole["position_ids"], torch.arange(TOKENS).expand(ROWS, -1))
    assert "attention_mask" not in whole and parts[1]["count"] == 3
    positions = torch.where(PADDED == 0, 1, PADDED.cumsum(1) - 1)
    part = cut(batch | {"position_ids": positions}, 1, Division(2))
    assert part["position_ids"].tolist() == positions[:, TOKENS // 2 :].tolist()


def cache_of(tokens):
    cache = transformers.DynamicCache()
    for layer in range(LAYERS):
        cache.update(*torch.randn(2, ROWS, HEADS, tokens, HIDDEN // HEADS), layer)
    return cache


def forward(rank, models, change):
    sequence = hf_zero.sequence_parallel(2)
    engine = start(models[rank], None, config_of(1), mpu=sequence)
    engine.train()
    batch = sequence.shard(BATCH)
    change(batch)
    engine(**batch)


CACHE = cache_argument(transformers.GPT2Model.forward)
CHANGES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda batch: batch.pop("position_ids"), "without position_ids"),
    (
        lambda batch: batch.update(attention_mask=torch.ones_like(batch["input_ids"])),
        "an attention_mask in training",
    ),
    (
        lambda batch: batch.update({CACHE: cache_of(TOKENS), "labels": None}),
        "8 queries and 24 keys",
    ),
]


@in_one_item(CHANGES, lambda row: row[-1])
def test_forwards_that_would_be_wrong(row):
    change, match = row
    models = [seeded(gpt2) for _ in range(2)]
    refused(match, 2, forward, models, change)


def evaluate(rank, models, others):
    sequence = hf_zero.sequence_parallel(2)
    engine = start(models[rank], None, config_of(1), mpu=sequence)
    with torch.no_grad():
        engine.eval()
        whole = engine(**BATCH).loss
        copied = copy.deepcopy(engine.module).train()(**BATCH).loss
        other = others[rank](**BATCH).loss  # with the same configuration
        engine.train()
        part = sequence.shard(BATCH)
        split = sequence.mean_loss(engine(**part).loss, part["labels"])
    engine.destroy()
    return whole, copied, other, split, models[rank].config._attn_implementation


def test_evaluation_copies_and_other_models_compute_whole_sequences():
    models = [seeded(llama) for _ in range(2)]
    others = []
    for model in models:
        other = transformers.LlamaForCausalLM(model.config)
        other.load_state_dict(model.state_dict())
        others.append(other)
    expected = seeded(llama)(**BATCH).loss
    for *losses, implementation in run_ranks(2, evaluate, models, others):
        for loss in losses:
            torch.testing.assert_close(loss, expected.detach())
        assert implementation == "sdpa"


def evaluate_parts(rank, models, change, both):
    sequence = hf_zero.sequence_parallel(2, in_evaluation=both)
    engine = start(models[rank], None, config_of(1), mpu=sequence)
    engine.eval()
    part = change(sequence, BATCH)
    labels = part["labels"]
    with torch.no_grad():
        return sequence.mean_loss(engine(**part).loss, labels)


PARTS = {
    "no labels": lambda sequence, batch: {**sequence.shard(batch), "shift_labels": None},
    "batches": lambda sequence, batch: next(iter(sequence.batches([batch]))),
    "copied": lambda sequence, batch: {
        name: value.clone() for name, value in sequence.shard(batch).items()
    },
}


@in_one_item(PARTS)
def test_parts_of_batches_in_evaluation(kind):
    models = [seeded(llama) for _ in range(2)]
    refused("in_evaluation=True", 2, evaluate_parts, models, PARTS[kind], False)
    if kind == "batches":  # where evaluation reads them
        models = [seeded(llama) for _ in range(2)]
        expected = seeded(llama)(**BATCH).loss.detach()
        for loss in run_ranks(2, evaluate_parts, models, PARTS[kind], True):
            torch.testing.assert_close(loss, expected)


def sized(*sizes):
    def call(model):
        for size in sizes:
            hf_zero.sequence_parallel(size)

    return call


def contradicting(model):
    config = config_of(1, sequence_parallel_size=4)
    start(model, None, config, mpu=hf_zero.sequence_parallel(2))


def both(sequence):
    section = {"sequence_parallel_size": sequence, "tensor_parallel": {"autotp_size": 2}}
    return lambda model: start(model, None, config_of(1, **section))


def shared_before(model):
    """Ranks 0 and 1 shared a sequence, and share layers now."""
    former = hf_zero.sequence_parallel(2)
    start(model, None, config_of(1, tensor_parallel={"autotp_size": 2}), mpu=former)


SIZES: list[tuple[int, int, Callable[[Any], Any], str]] = [
    (2, 4, sized(3), "sequence_parallel_size = 3 does not divide 2 ranks"),
    (2, 4, sized(None), "called without a size"),
    (2, 4, sized(2, 1), "are sequence parallel in groups of 2"),
    (
        2,
        4,
        contradicting,
        "sequence_parallel_size = 4 .* contradicts the mpu of sequence_parallel_size = 2",
    ),
    (4, 4, both(4), "sequence_parallel_size = 4 does not divide 2 ranks"),
    (4, 2, both(2), "sequence_parallel_size = 2 does not divide 1 attention heads"),
    (4, 4, shared_before, "has moved the ranks that share a sequence"),
]


@in_one_item(SIZES, lambda row: row[-1])
def test_sizes_that_cannot_be(row):
    ranks, heads, call, match = row
    models = [seeded(partial(llama, num_attention_heads=heads)) for _ in range(ranks)]
    refused(match, ranks, lambda rank: call(models[rank]))


SP2 = Ranks(2)
Given = Callable[[Any, int, int], Any]


def forwards(rank, models, ranks, given, count):
    config = config_of(1, tensor_parallel={"autotp_size": ranks.tensor})
    engine = start(
        models[rank], sgd(models[rank]), config | {"sequence_parallel_size": ranks.sequence}
    )
    sequence = hf_zero.sequence_parallel()
    engine.train()
    parts = [given(sequence, rank, step) for step in range(count)]
    for part in parts:
        engine(**part)
    engine.destroy()


def run(given, ranks=SP2, count=1):
    models = [seeded(llama) for _ in range(ranks.world)]
    run_ranks(ranks.world, forwards, models, ranks, given, count)


def documents_that_differ(sequence, rank, step):
    """In the third forward, before which no hashes of batches are compared."""
    first = 5 + 2 * (rank == 1 and step == 2)
    places = torch.cat([torch.arange(first), torch.arange(TOKENS - first)])
    return sequence.shard(plain(At(0, 0, 0)) | {"position_ids": places.expand(2, -1)})


def uneven(sequence, rank, step):
    batch = plain(At(0, 0, 0)) | {"position_ids": torch.arange(TOKENS).expand(2, -1)}
    own = slice(0, 9) if rank == 0 else slice(9, TOKENS)
    return {name: each[:, own] for name, each in batch.items()}


# what ranks are given, ranks, forwards, words of the message
DIFFERENT: dict[str, tuple[Given, Ranks, int, str]] = {
    "batches": (
        lambda sequence, rank, step: sequence.shard(plain(At(0, 0, rank))),
        SP2,
        1,
        "ranks 0, 1, which share sequences .* read data as rank // 2 of ranks // 2",
    ),
    # ranks 0 and 1 share layers, 0 and 2 sequences
    "batches, beside shared layers": (
        lambda sequence, rank, step: sequence.shard(plain(At(0, 0, rank // 2))),
        Ranks(2, 1, 2),
        1,
        "ranks (0, 2|1, 3), which share .* read data as rank // 4 of ranks // 4",
    ),
    "later batches": (
        lambda sequence, rank, step: sequence.shard(plain(At(step, 0, rank * (step == 3)))),
        SP2,
        4,
        "different batches",
    ),
    "documents": (documents_that_differ, SP2, 3, "different batches"),
    "sizes": (uneven, SP2, 1, r"parts of \[\[2, 9\], \[2, 7\]\] tokens"),
}


@in_one_item(DIFFERENT)
def test_ranks_that_are_given_different(what):
    given, ranks, count, match = DIFFERENT[what]
    with pytest.raises(RankFailed, match=match) as raised:
        run(given, ranks, count)
    assert isinstance(raised.value.__cause__, RankMismatchError)


def cut_by_hand(sequence, rank, step):
    batch = plain(At(step, 0, 0))
    if step == 0 and rank == 1:  # not known to shard
        part = {name: each[:, TOKENS // 2 :] for name, each in batch.items()}
        return part | {"position_ids": torch.arange(TOKENS // 2, TOKENS).expand(2, -1)}
    return sequence.shard(batch)


def alike_in_other_batches(sequence, rank, step):
    """Padding, cut for the second rank from two batches before any of them is read."""
    batch = plain(At(step, 0, 0))
    batch["input_ids"][:, TOKENS // 2 :] = 2
    return sequence.shard(batch)


@in_one_item((cut_by_hand, alike_in_other_batches))
def test_ranks_that_are_given_parts_of_one_batch(given):
    run(given, SP2, 5)
