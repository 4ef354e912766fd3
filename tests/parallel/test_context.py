"""Sequences whose tokens stay on the ranks of a ring, against one process: models, ring attention
with its blocks, and the kernels of a block.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import hf_zero
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import init_parallel
from hf_zero.errors import ConfigError
from hf_zero.integrations.fused.sparse_attention import sparsify
from hf_zero.parallel.sequence import block_kernels
from hf_zero.parallel.sequence.block_kernels import KERNELS, kernels_on
from hf_zero.parallel.sequence.blocks import Pattern
from hf_zero.parallel.sequence.distributed_attention import DistributedAttention
from hf_zero.parallel.sequence.division import Division
from hf_zero.parallel.sequence.documents import Documents
from hf_zero.parallel.sequence.ring import ring_attention
from tests.helpers import oracle
from tests.helpers.causal_zoo import tiny
from tests.helpers.cells import in_one_item, in_turn
from tests.helpers.engines import config_of, start
from tests.helpers.models import seeded
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.sequences import (
    Ranks,
    SequenceJob,
    gpt2,
    half_labeled,
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
    "labels of half": SequenceJob(llama, half_labeled),
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


def sparse():
    model = llama(max_position_embeddings=256)
    sparsify(model, SPARSE["sparse_attention"])
    return model


REFUSED = {
    "divide": (llama, {"context_parallel_size": 3}, "context_parallel_size = 3 .*divide 2 ranks"),
    "both sizes": (
        llama,
        {**CONTEXT, "sequence_parallel_size": 2},
        "sequence_parallel_size = 2 and context_parallel_size = 2 does not divide 2 ranks",
    ),
    "directions": (BOTH_WAYS, CONTEXT, "in both directions"),
    "sparse": (partial(llama, max_position_embeddings=256), {**CONTEXT, **SPARSE},
               "sparse_attention does not go with context_parallel_size: 2: its blocks are of"),
    "sparse by the script": (sparse, CONTEXT, "cannot split sparse_attention"),
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


ROWS, TOKENS = 2, 24


def documents_of(lengths, window=0):
    """Documents of these lengths in each row; one row stands for all rows."""
    rows = [torch.cat([torch.arange(length) for length in row]) for row in lengths]
    return dataclasses.replace(Documents.from_positions(0, torch.stack(rows)), window=window)


WHOLE, PACKED = [[TOKENS]], [[5, 1, 7, 8, 3], [9, 15]]
ALIKE = [[10, 14]]


def allowed(documents):
    """Which keys each token of each row attends to."""
    first, tokens = documents.first_keys(ROWS), torch.arange(TOKENS)
    return (tokens >= first[..., None]) & (tokens <= tokens[:, None])


def plain(documents, scale, sinks, query, key, value):
    """Attention of [B, H, S, D] with a mask, and a key with a value of zero for the sinks."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    scores = query @ key.transpose(-1, -2) * (scale or query.shape[-1] ** -0.5)
    scores = scores.masked_fill(~allowed(documents)[:, None], float("-inf"))
    if sinks is not None:
        of_sinks = sinks[:, None, None].expand(*scores.shape[:2], TOKENS, 1)
        scores = torch.cat([scores, of_sinks], -1)
        value = F.pad(value, (0, 0, 0, 1))
    return scores.softmax(-1) @ value


def computed(attention, tensors):
    """The output [B, H, s, D], and the gradients of the ``tensors`` before the last."""
    *given, grad = tensors
    given = [None if each is None else each.detach().requires_grad_() for each in given]
    out = attention(*given)
    out.backward(grad)
    return [out.detach(), *(None if each is None else each.grad for each in given)]


# lengths, window, heads of keys and values, width of values, sinks, scale
CASES = {
    "causal": (WHOLE, 0, 4, 8, False, None),
    "grouped heads, a narrow value, a scale": (WHOLE, 0, 2, 5, False, 0.3),
    "packed": (PACKED, 0, 1, 8, False, None),
    "packed alike": (ALIKE, 0, 2, 8, False, None),
    "window": (WHOLE, 5, 2, 8, False, None),
    "window of one": (WHOLE, 1, 2, 8, False, None),
    "packed alike, window": (ALIKE, 9, 2, 8, False, None),
    "packed, window, sinks": (PACKED, 6, 2, 8, True, None),
    "sinks": (WHOLE, 0, 4, 8, True, 0.5),
}


@in_one_item([(name, ranks) for name in CASES for ranks in (2, 3, 4)])
def test_ring_attention_as_in_one_process(case):
    name, ranks = case
    lengths, window, shared, width, has_sinks, scale = CASES[name]
    documents, division = documents_of(lengths, window), Division(context=ranks)
    draw = torch.Generator().manual_seed(3)
    sizes = ((4, 8), (shared, 8), (shared, width), (4, width))
    query, key, value, grad = (
        torch.randn(ROWS, heads, TOKENS, size, generator=draw) for heads, size in sizes
    )
    sinks = torch.randn(4, generator=draw) if has_sinks else None

    def on_rank(rank):
        groups = init_parallel(ParallelDims.over(ranks, context=ranks))
        own = [division.part(each, rank, 2) for each in (query, key, value, grad)]
        found = computed(
            lambda sinks, *given: ring_attention(
                groups.along("context"), documents, *given, scale, sinks
            ).transpose(1, 2),
            [sinks, *own],
        )
        return found, dict(groups.stats["context"].bytes)

    want = computed(
        lambda sinks, *given: plain(documents, scale, sinks, *given),
        [sinks, query, key, value, grad],
    )
    results = run_ranks(ranks, on_rank)
    for at, whole in enumerate(want):
        parts = [found[at] for found, _ in results]
        if at == 1:  # each rank has the gradient of the sinks from its own tokens
            assert whole is None or torch.allclose(sum(parts), whole, rtol=1e-5, atol=1e-5)
        else:
            torch.testing.assert_close(division.whole(parts, 2), whole, rtol=1e-5, atol=2e-6)
    # keys and values go to all ranks, twice; their gradients as far
    message = ROWS * shared * TOKENS // ranks * (8 + width) * 4
    sent = 3 * (ranks - 1) * message
    assert all(found.get("send_to_next", 0) == sent for _, found in results)


def test_in_16_bits():
    """Sums over blocks are in fp32: the difference is that of the kernel on whole sequences."""
    documents, division = documents_of(WHOLE), Division(context=4)
    draw = torch.Generator().manual_seed(3)
    exact = [torch.randn(ROWS, 4, TOKENS, 8, generator=draw) for _ in range(4)]
    half = [each.bfloat16() for each in exact]

    def on_rank(rank):
        dim = init_parallel(ParallelDims.over(4, context=4)).along("context")
        own = [division.part(each, rank, 2) for each in half]
        return computed(lambda *given: ring_attention(dim, documents, *given).transpose(1, 2), own)

    want = computed(lambda *given: plain(documents, None, None, *given), [x.float() for x in half])
    for at, parts in enumerate(zip(*run_ranks(4, on_rank))):
        whole = division.whole(parts, 2)
        assert whole.dtype == torch.bfloat16
        torch.testing.assert_close(whole.float(), want[at], rtol=2e-2, atol=2e-2)


def test_a_division_joins_what_it_cuts():
    whole = torch.arange(48).view(2, 24)
    for sequence, context in ((1, 1), (2, 1), (1, 2), (1, 3), (2, 2), (3, 4)):
        division = Division(sequence, context)
        assert 24 % division.multiple == 0
        parts = [division.part(whole, rank) for rank in range(division.ranks)]
        assert torch.equal(division.whole(parts), whole)
        assert {part.shape[1] for part in parts} == {24 // division.ranks}
    assert Division(2, 2).part(whole, 0)[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert Division(2, 2).part(whole, 1)[0].tolist() == [18, 19, 20, 21, 22, 23]
    assert Division(1, 4).part(whole, 1)[0].tolist() == [3, 4, 5, 18, 19, 20]


def test_devices_without_kernels():
    with pytest.raises(ConfigError, match="none for xla; write sequence_parallel_size"):
        kernels_on(torch.device("xla"))


@in_one_item([torch.float32, torch.bfloat16])
def test_shapes_of_the_kernels_on_gpus(dtype):
    """Torch knows the arguments of its kernels, and the shapes of their results, without a GPU."""
    kernels = KERNELS["cuda"]
    query, key, value, grad = (
        torch.empty(ROWS, 24, heads, width, dtype=dtype, device="meta")
        for heads, width in ((4, 12), (2, 12), (2, 5), (4, 5))
    )
    for pattern in Pattern:
        out, sums = kernels.attend(pattern, query, key, value, scale=0.5)
        assert out.shape == grad.shape and sums.shape == query.shape[:3]
        tensors = grad, query, key, value, out, sums
        grads = kernels.gradients(pattern, *tensors, scale=0.5)
        assert [each.shape for each in grads] == [each.shape for each in (query, key, value)]


def flash_for_gpus(grad, *tensors, scale):
    """Torch's flash backward for GPUs, which takes log-sum-exps for contiguous."""
    *given, out, sums, _, _, _, _, dropout, causal, _, _ = tensors
    sums = sums.as_strided(sums.shape, torch.empty(sums.shape).stride())
    return on_cpu_backward(grad, *given, out, sums, dropout, causal, scale=scale)


def efficient_for_gpus(grad, *tensors, scale):
    """Torch's memory-efficient backward for GPUs: it takes the last stride of log-sum-exps for 1,
    that of tokens of the output for heads x width, and infinity for what the forward pads with.
    """
    *given, _, out, sums, _, _, dropout, _, causal = tensors
    assert out.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in sums.stride()[:2])
    _, heads, tokens, width = out.shape
    out = out.as_strided(out.shape, (out.stride(0), out.stride(1), heads * width, 1))
    sums = sums.as_strided(sums.shape, (*sums.stride()[:2], 1))
    assert bool((sums[..., tokens:] == math.inf).all()) and sums.shape[2] % 32 == 0
    sums = sums[..., :tokens]
    return *on_cpu_backward(grad, *given, out, sums, dropout, causal, scale=scale), None


on_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@in_turn("dtype, tokens, width, pattern", [
    *itertools.product((torch.float32, torch.bfloat16), (24, 32), (8, 5), Pattern)
])  # fmt: skip
def test_kernels_on_gpus_read_what_they_are_given(monkeypatch, dtype, tokens, width, pattern):
    """The kernels ignore strides of outputs and log-sum-exps, here of a part of a sequence."""
    backward = "_scaled_dot_product_{}_attention_backward"
    of_gpus = {"flash": flash_for_gpus, "efficient": efficient_for_gpus}
    aten = SimpleNamespace(**{backward.format(name): each for name, each in of_gpus.items()})
    draw = torch.Generator().manual_seed(3)
    query, key, value, grad = (
        torch.randn(ROWS, tokens + 8, heads, size, generator=draw).to(dtype)[:, 8:]
        for heads, size in ((4, 8), (2, 8), (2, width), (4, width))
    )
    out, sums = KERNELS["cpu"].attend(pattern, query, key, value, scale=0.5)
    out, sums = (torch.cat([each, each], 1)[:, :tokens] for each in (out, sums))
    tensors = grad, query, key, value, out, sums
    want = KERNELS["cpu"].gradients(pattern, *tensors, scale=0.5)
    with monkeypatch.context() as patched:
        patched.setattr(block_kernels, "aten", aten)
        found = KERNELS["cuda"].gradients(pattern, *tensors, scale=0.5)
    for own, each in zip(found, want):
        torch.testing.assert_close(own, each)
