"""Refusals of sequence parallelism, by key and remedy; models that it leaves alone; state that it
leaves behind; ranks of one group that are given other batches.
"""

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
from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError, NotBuiltError, RankMismatchError
from hf_zero.parallel.alike import due
from hf_zero.parallel.sequence.batches import cut
from hf_zero.techniques.registry import TrainingTechniques
from tests.helpers.engines import config_of, start
from tests.helpers.models import HEADS, HIDDEN, LAYERS, VOCAB, Stack, bert, seeded, t5
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.sequences import ROWS, TOKENS, Ranks, gpt2, llama, plain, qwen3
from tests.helpers.training import At, sgd


def gemma2():
    config = transformers.Gemma2Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=4,
        layer_types=["full_attention", "full_attention"],
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config)


def mistral():
    config = transformers.MistralConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=4,
    )  # fmt: skip
    return transformers.MistralForCausalLM(config)


def mamba():
    config = transformers.MambaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=1, state_size=4, time_step_rank=2
    )
    return transformers.MambaForCausalLM(config)


ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
MODELS: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "bidirectional": (bert, 2, "attends in both directions, .* set sequence_parallel_size to 1"),
    "two sequences": (t5, 2, "it attends across two sequences"),
    "sliding layers": (partial(qwen3, **SLIDING), 2, "layers of sliding_attention; .*sliding"),
    "a window": (mistral, 2, "window of 4; set config.sliding_window to None"),
    "soft-capping": (gemma2, 2, "set attn_logit_softcapping to None|sliding_window"),
    "state": (mamba, 2, "layers of linear_attention; use a model of full"),
    "rotary": (partial(llama, rope_parameters=ROPE), 2, "is dynamic, .* write a rope_type"),
    "heads": (partial(llama, num_attention_heads=2), 4, "does not divide 2 attention heads"),
    "no transformer": (Stack, 2, "needs a model of transformers, .* not Stack"),
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
    with pytest.raises(RankFailed) as raised:
        run_ranks(ranks, *args)
    assert isinstance(raised.value.__cause__, ConfigError)
    assert raised.match(match)


@pytest.mark.parametrize("kind", MODELS)
def test_models_that_cannot_be_split(kind):
    make, size, match = MODELS[kind]
    models = [seeded(make) for _ in range(size)]
    refused(match, size, initialized, models, size, config_of(1))


# ---- batches ----

BATCH = plain(At(0, 0, 0))
ONES = torch.ones(ROWS, TOKENS, dtype=torch.int64)
COUNTED = torch.arange(TOKENS)
PACKED = BATCH | {"position_ids": torch.where(COUNTED < 6, COUNTED, COUNTED - 6)[None]}
PADDED = torch.where(torch.arange(TOKENS) < 10, ONES, 0)


@pytest.mark.parametrize(
    ("batch", "parts", "match"),
    [
        ([ONES], 2, "mappings of names to tensors, not a list"),
        ({"x": ONES}, 2, "cannot tell how long .* name their tokens input_ids"),
        (BATCH, 3, "16 tokens do not divide .* pad_to_multiple_of=3"),
        (BATCH | {"attention_mask": ONES.tril() * 0 + ONES.triu()}, 2, "padding on the left"),
        (BATCH | {"attention_mask": PADDED}, 2, r"labels\[attention_mask == 0\] = -100"),
        (PACKED | {"attention_mask": ONES}, 2, "restart .* at token 6, .* leave attention_mask"),
        (BATCH | {"attention_mask": ONES[:, None, None]}, 2, r"attention_mask of shape \[2, 1"),
        (BATCH | {"position_ids": ONES.expand(3, ROWS, TOKENS)}, 2, r"position_ids of shape \[3"),
    ],
)
def test_batches_that_cannot_be_cut(batch, parts, match):
    with pytest.raises(ConfigError, match=match):
        cut(batch, 0, parts)


def test_positions_of_padding_may_begin_anew_beside_a_mask():
    """Such positions are ``mask.cumsum(1) - 1``, with any value for padding."""
    labels = BATCH["labels"].masked_fill(PADDED == 0, -100)
    positions = torch.where(PADDED == 0, 1, PADDED.cumsum(1) - 1)
    part = cut(
        BATCH | {"labels": labels, "attention_mask": PADDED, "position_ids": positions}, 1, 2
    )
    assert part["position_ids"].tolist() == positions[:, TOKENS // 2 :].tolist()


def test_a_batch_is_cut_after_its_labels_are_shifted():
    mask = ONES.clone()
    mask[:, 10:] = 0
    labels = BATCH["labels"].masked_fill(mask == 0, -100)
    batch = BATCH | {"attention_mask": mask, "labels": labels, "count": 3}
    parts = [cut(batch, part, 2) for part in (0, 1)]
    whole = {
        name: torch.cat([part[name] for part in parts], 1) for name in parts[0] if name != "count"
    }
    assert torch.equal(whole["input_ids"], BATCH["input_ids"])
    assert torch.equal(whole["shift_labels"][:, :-1], labels[:, 1:])
    assert bool((whole["shift_labels"][:, -1] == -100).all())
    assert torch.equal(whole["position_ids"], torch.arange(TOKENS).expand(ROWS, -1))
    assert "attention_mask" not in whole and parts[1]["count"] == 3


SEQLEN = {"curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 16,
          "schedule_type": "fixed_linear",
          "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 8}}  # fmt: skip
LTD = {"total_layer_num": 2, "random_ltd_layer_num": 1, "random_ltd_layer_id": [0],
       "random_ltd_schedule": {"min_value": 8, "max_value": 16, "schedule_type": "fixed_linear",
                               "schedule_config": {"require_steps": 4, "seq_per_step": 8}},
       }  # fmt: skip
PHASE = {"steps": 4, "sequence_length": 8}


@pytest.mark.parametrize(
    ("key", "section"),
    (
        ("curriculum_learning", {"enabled": True, **SEQLEN}),
        ("data_efficiency", {"enabled": True, "data_routing": {
            "enabled": True, "random_ltd": {"enabled": True, **LTD}}}),
        ("training_phases", {"phases": [PHASE]}),
    ),
)  # fmt: skip
def test_techniques_that_shorten_sequences(key, section):
    config = config_of(1, sequence_parallel_size=2, **{key: section})
    with pytest.raises(ConfigError, match=f"{key}.* shortens sequences"):
        TrainingTechniques(ZeroConfig.from_dict(config).resolve(2))


# ---- forwards ----


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


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda batch: batch.pop("position_ids"), r"without position_ids of \[rows, tokens\]"),
        (
            lambda batch: batch.update(attention_mask=torch.ones_like(batch["input_ids"])),
            r"an attention_mask in training .*\.shard",
        ),
        (
            lambda batch: batch.update(past_key_values=cache_of(TOKENS), labels=None),
            r"8 queries and 24 keys .*\.shard",
        ),
    ],
)
def test_forwards_that_would_be_wrong(change, match):
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


def without_labels(sequence, batch):
    part = dict(sequence.shard(batch))
    part["shift_labels"] = None
    return part


PARTS = {
    "shard": lambda sequence, batch: sequence.shard(batch),
    "no labels": without_labels,
    "batches": lambda sequence, batch: next(iter(sequence.batches([batch]))),
    "copied": lambda sequence, batch: {
        name: value.clone() for name, value in sequence.shard(batch).items()
    },
}


@pytest.mark.parametrize("kind", PARTS)
def test_parts_of_batches_in_evaluation(kind):
    models = [seeded(llama) for _ in range(2)]
    match = "in eval.. was given a part of a batch .* in_evaluation=True"
    refused(match, 2, evaluate_parts, models, PARTS[kind], False)


def test_parts_of_batches_where_evaluation_reads_them():
    models = [seeded(llama) for _ in range(2)]
    expected = seeded(llama)(**BATCH).loss.detach()
    for loss in run_ranks(2, evaluate_parts, models, PARTS["batches"], True):
        torch.testing.assert_close(loss, expected)


# ---- sizes ----


def sized(rank, sizes):
    for size in sizes:
        hf_zero.sequence_parallel(size)


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ([3], "sequence_parallel_size = 3 does not divide 2 ranks; choose a divisor"),
        ([None], "called without a size, and this job is not sequence parallel"),
        ([2, 1], "are sequence parallel in groups of 2; the size stays .*start new ones"),
    ],
)
def test_sizes_that_cannot_be(sizes, match):
    refused(match, 2, sized, sizes)


def contradicting(rank, models):
    config = config_of(1, sequence_parallel_size=4)
    start(models[rank], None, config, mpu=hf_zero.sequence_parallel(2))


def test_a_size_that_contradicts_the_mpu():
    models = [seeded(llama) for _ in range(2)]
    refused("sequence_parallel_size = 4 .* contradicts the mpu of 2", 2, contradicting, models)


def both(rank, models, sequence):
    tensor = {"autotp_size": 2}
    config = config_of(1, sequence_parallel_size=sequence, tensor_parallel=tensor)
    start(models[rank], None, config)


@pytest.mark.parametrize(
    ("sequence", "heads", "match"),
    [
        (4, 4, r"sequence_parallel_size = 4 does not divide 2 ranks \(4 / 2 that split the model"),
        (2, 2, r"sequence_parallel_size = 2 does not divide 1 attention heads of each of 2 tensor"),
    ],
)
def test_sizes_that_cannot_be_beside_shared_layers(sequence, heads, match):
    models = [seeded(partial(llama, num_attention_heads=heads)) for _ in range(4)]
    refused(match, 4, both, models, sequence)


def shared_before(rank, models):
    former = hf_zero.sequence_parallel(2)
    start(models[rank], None, config_of(1, tensor_parallel={"autotp_size": 2}), mpu=former)


def test_sequences_that_were_shared_before_the_configuration_shares_layers():
    """Ranks 0 and 1 shared a sequence, and share layers now."""
    models = [seeded(llama) for _ in range(4)]
    refused("which has moved the ranks that share a sequence; call it", 4, shared_before, models)


def test_batch_sizes_count_groups():
    values = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "sequence_parallel_size": 4,
    }
    config = ZeroConfig.from_dict(values).resolve(8)
    assert config.train_batch_size == 2 * 3 * 2
    assert "ranks / sequence_parallel_size" in config.sources["train_batch_size"]
    with pytest.raises(ConfigError, match=r"= 4 .* does not divide 6 ranks"):
        ZeroConfig.from_dict(values).resolve(6)


def test_another_mpu_with_parts_of_sequences():
    class Other:
        get_sequence_parallel_world_size = staticmethod(lambda: 2)

    with pytest.raises(NotBuiltError, match="sequence parallelism"):
        hf_zero.initialize(model=seeded(llama), mpu=Other(), config="zero1")


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


def parted(match, *args):
    with pytest.raises(RankFailed) as raised:
        run(*args)
    assert isinstance(raised.value.__cause__, RankMismatchError)
    assert raised.match(match)


def test_other_batches():
    parted(
        r"ranks 0, 1, which share sequences \(sequence_parallel_size = 2\), were given parts of "
        r"different batches; read data as rank // 2 of ranks // 2 .*\.batches\(loader\)",
        lambda sequence, rank, step: sequence.shard(plain(At(0, 0, rank))),
    )


def test_other_batches_beside_shared_layers():
    """Ranks 0 and 1 share layers, 0 and 2 sequences."""
    parted(
        r"ranks (0, 2|1, 3), which share .* read data as rank // 4 of ranks // 4",
        lambda sequence, rank, step: sequence.shard(plain(At(0, 0, rank // 2))),
        Ranks(2, 1, 2),
    )


def test_other_batches_later_and_after_others_were_cut():
    parted(
        "different batches",
        lambda sequence, rank, step: sequence.shard(plain(At(step, 0, rank * (step == 3)))),
        SP2,
        4,
    )


def test_other_documents_are_told_in_the_same_forward():
    """Also in the third one, before which no hashes of batches are compared."""

    def given(sequence, rank, step):
        first = 5 + 2 * (rank == 1 and step == 2)
        places = torch.cat([torch.arange(first), torch.arange(TOKENS - first)])
        return sequence.shard(plain(At(0, 0, 0)) | {"position_ids": places.expand(2, -1)})

    assert not due(3)
    parted("different batches", given, SP2, 3)


def test_parts_of_other_sizes():
    def uneven(sequence, rank, step):
        batch = plain(At(0, 0, 0)) | {"position_ids": torch.arange(TOKENS).expand(2, -1)}
        own = slice(0, 9) if rank == 0 else slice(9, TOKENS)
        return {name: each[:, own] for name, each in batch.items()}

    parted(r"ranks 0, 1, .* parts of \[\[2, 9\], \[2, 7\]\] tokens; .*shard\(batch\)", uneven)


def test_batches_that_are_alike_and_parts_that_were_cut_by_hand():
    def given(sequence, rank, step):
        batch = plain(At(step, 0, 0))
        if step == 0 and rank == 1:  # not known to shard
            part = {name: each[:, TOKENS // 2 :] for name, each in batch.items()}
            return part | {"position_ids": torch.arange(TOKENS // 2, TOKENS).expand(2, -1)}
        return sequence.shard(batch)

    run(given, SP2, 5)


def test_parts_that_are_alike_in_other_batches():
    """Padding, cut for the second rank from two batches before any of them is read."""

    def given(sequence, rank, step):
        batch = plain(At(step, 0, 0))
        batch["input_ids"][:, TOKENS // 2 :] = 2
        return sequence.shard(batch)

    run(given, SP2, 2)


def test_when_ranks_compare():
    assert [count for count in range(1, 1025) if due(count)] == [
        1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024,
    ]  # fmt: skip
