"""Sequences that ranks share, against one process; every causal model type of transformers."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import hf_zero
from hf_zero.errors import ConfigError
from hf_zero.integrations import fused
from hf_zero.integrations.fused import sequence_attention
from hf_zero.integrations.transformers.trainer_phases import counting_whole_batches
from hf_zero.parallel.sequence import batches
from hf_zero.parallel.sequence.distributed_attention import DistributedAttention
from hf_zero.parallel.sequence.division import Division
from hf_zero.parallel.sequence.documents import Documents
from hf_zero.techniques.layer_drop import draw
from tests.helpers import oracle
from tests.helpers.causal_zoo import batch_of, by_model_type, tiny
from tests.helpers.cells import in_one_item
from tests.helpers.engines import start
from tests.helpers.models import Stack, seeded
from tests.helpers.oracle import compare_tensors
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import (
    Ranks,
    SequenceJob,
    half_labeled,
    llama,
    mixtral,
    packed,
    plain,
    qwen3,
    train_on_threads,
)
from tests.helpers.training import Plan, plain_sgd
from tests.parallel.expert_cases import OnSpreadExperts, keys
from tests.parallel.test_tensor_layers import loss_and_gradients

SP2, SP4, BOTH, TENSOR = Ranks(2), Ranks(4), Ranks(2, 2), Ranks(2, 1, 2)


def padded_inside(at):
    """The padding token among others, which have labels, as where it ends documents."""
    batch = plain(at)
    batch["input_ids"][0, [2, 6, 9]] = 0
    batch["input_ids"][1, 12:] = 0
    return batch


JOBS = {
    "llama": SequenceJob(llama),
    "packed, one head of keys": SequenceJob(partial(llama, kv_heads=1, use_cache=False), packed),
    "a rank without labels": SequenceJob(llama, half_labeled),
    # positions that the model counts from its padding: in a table, in embeddings
    "roberta": SequenceJob(partial(tiny, "roberta", pad_token_id=1), padded_inside),
}
# name, ranks, stage, accumulation
CELLS = [
    ("llama", BOTH, 2, 2),
    ("llama", TENSOR, 3, 2),
    ("packed, one head of keys", SP4, 3, 1),
    ("a rank without labels", SP2, 3, 1),
    ("roberta", SP2, 1, 1),
]


def check(name, ranks, stage, accumulation):
    plan = Plan(ranks=ranks.data, steps=2, accumulation=accumulation)
    found, stats = train_on_threads(JOBS[name], plan, ranks, stage)
    oracle.compare(found, oracle.run(JOBS[name], plan))
    return stats


@in_one_item(CELLS)
def test_as_in_one_process(cell):
    check(*cell)


def test_bytes_along_the_sequence():
    """Queries, keys, values and output, there and back; sizes and codes of batches and losses."""
    rows, layers, heads, shared, width, tokens = 2, 2, 4, 2, 8, 16 // 2
    stats = check("llama", SP2, 3, 1)
    each = rows * tokens * width * 4 * (heads + 2 * shared + heads)
    for found in stats:
        assert found.counts["all_to_all"] == 2 * layers * 2 * 2  # steps, passes, there and back
        assert found.bytes["all_to_all"] == 2 * layers * 2 * each
        losses, compared = 2 * 2 * 8, 2 * 4 * 8
        assert found.bytes["all_gather"] == 2 * (losses + compared)
        assert set(found.counts) == {"all_to_all", "all_gather"}


def adapted():
    """LoRA on every linear layer; both matrices are drawn, so that all have gradients."""
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(llama(), config)  # type: ignore[arg-type, return-value]


BLOCKS = {"activation_checkpointing": {"blocks": True, "cpu_checkpointing": True}}
SPARSE = {
    "mode": "fixed", "block": 16, "attention": "unidirectional", "num_local_blocks": 1,
    "different_layout_per_head": True,
}  # fmt: skip
OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
CASES: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "adapters, offload": (adapted, plain, {"zero_optimization": {"stage": 3, **OFFLOAD}}),
    "recomputed documents": (partial(llama, use_cache=False), packed, BLOCKS),
    "no logits, a rank without labels": (llama, half_labeled, {"kernels": ["loss"]}),
    "all kernels, tied": (
        qwen3,
        plain,
        {"kernels": ["loss", "norms", "rotary", "qkv", "activations"]},
    ),
    "MLPs in stretches": (llama, plain, {"tiled_mlp": {"enabled": True}}),
}


@in_one_item(CASES)
def test_features_as_in_one_process(case):
    make, batch, config = CASES[case]
    job, plan = SequenceJob(make, batch), Plan(steps=2)
    found, stats = train_on_threads(job, plan, SP2, 3, **config)
    oracle.compare(found, oracle.run(job, plan))
    passes = 3 if "recomputed" in case else 2
    # in each of two steps and two layers: there and back
    assert {each.counts["all_to_all"] for each in stats} == {2 * 2 * 2 * passes}


def test_sparse_attention():
    """The layout of a rank's heads is theirs, where heads differ."""
    make = partial(llama, max_position_embeddings=256)

    def sparse():
        model = make()
        fused.prepare(model, "off", dict(SPARSE), False, ())
        return model

    job, plan = SequenceJob(sparse, long_rows), Plan(ranks=1, steps=1)
    found, _ = train_on_threads(SequenceJob(make, long_rows), plan, SP2, 1, sparse_attention=SPARSE)
    oracle.compare(found, oracle.run(job, plan), 1e-5)


def test_forwards_that_leave_all_blocks_out() -> None:
    """They attend to nothing, which is no fault of theirs."""
    steps, seed = 6, 3
    drop = {"enabled": True, "theta": 1e-6, "gamma": 100.0}  # after a step the last is left out
    assert any(draw(seed, step, 0, 2)[0] >= 0.5 for step in range(1, steps))
    job, plan = SequenceJob(llama), Plan(ranks=1, steps=steps)
    found, _ = train_on_threads(job, plan, SP2, 1, progressive_layer_drop=drop, seed=seed)
    assert all(map(math.isfinite, found.losses))


def test_experts_of_ranks_that_share_sequences():
    """Two groups of two, whose four ranks have the experts among them by twos."""
    job, ranks = SequenceJob(mixtral), Ranks(2, 2)
    plan = Plan(ranks=2, steps=2)
    found, _ = train_on_threads(job, plan, ranks, 3, OnSpreadExperts, **keys(2))
    oracle.compare(found, oracle.run(job, plan))


def long_rows(at):
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 60, (2, 128), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


@in_one_item([torch.float32, torch.bfloat16, torch.float16])
def test_the_mean_loss_is_one_number_on_all_ranks(dtype):
    values, counts = [3.9, 1.3, 0.7], [8, 2, 3]
    losses = [torch.tensor(value, dtype=dtype, requires_grad=True) for value in values]

    def rank(number):
        sequence = hf_zero.sequence_parallel(3)
        labels = torch.where(torch.arange(8)[None] < counts[number], 5, -100)
        mean = sequence.mean_loss(losses[number], labels)
        mean.backward()
        return mean.item()

    whole = [loss.detach().double() for loss in losses]
    want = sum(loss * count for loss, count in zip(whole, counts)) / sum(counts)
    assert run_ranks(3, rank) == [want.to(dtype).item()] * 3
    for loss, count in zip(losses, counts):
        assert loss.grad.item() == pytest.approx(3 * count / sum(counts), rel=1e-2)


def test_in_16_bits():
    """Sums over the tokens of two ranks are rounded before they are added, as over two batches."""
    job, plan = SequenceJob(llama), Plan(ranks=1, steps=2, precision="bf16")
    found, _ = train_on_threads(job, plan, SP2, 2)
    exact = oracle.run(job, Plan(ranks=1, steps=2))
    oracle.compare_mixed(found, oracle.run(job, plan), exact, plan.dtype, 1.5)


class Repeats:
    """An axis whose other ranks send what this one does."""

    rank, size = 0, 4
    host_messages_on = torch.device("cpu")

    def all_gather(self, pairs, key):
        for whole, own in pairs:
            whole.view(self.size, -1).copy_(own)
        return SimpleNamespace(wait=lambda: None)


class Loader(list[Any]):
    """A loader of which each of the four ranks has read two samples."""

    samples_of_all_ranks = 8
    place = {"samples": 8}


def test_the_place_leaves_out_batches_that_were_not_yielded():
    loader = Loader([{"input_ids": torch.arange(16).view(2, 8)}])
    shared = batches.SequenceBatches(loader, Repeats(), Division(4))
    assert [shared.place["samples"] for _ in shared] == [2, 4, 6, 8]


class ShorterElsewhere(Repeats):
    """An axis on which the batch of another rank is the last of its loader."""

    def all_gather(self, pairs, key):
        handle = super().all_gather(pairs, key)
        for whole, own in pairs:
            if own.dtype == torch.uint8:
                ends = pickle.loads(own.numpy().tobytes())[0], True
                sent = bytearray(pickle.dumps(ends))
                whole.view(self.size, -1)[2] = torch.frombuffer(sent, dtype=torch.uint8)
        return handle


def test_the_last_batch_of_the_shortest_loader_ends_the_window():
    """As Accelerate's loaders say which batch is the last, with ``even_batches=False``."""
    for axis, last in ((Repeats(), False), (ShorterElsewhere(), True)):
        loader: Any = Loader([{"input_ids": torch.arange(16).view(2, 8)}])
        loader.end_of_dataloader = False
        ends = [
            loader.end_of_dataloader for _ in batches.SequenceBatches(loader, axis, Division(4))
        ]
        assert ends == [False, False, False, last]


ROWS, TOKENS, HEADS, WIDTH = 2, 12, 4, 5
FIRST = (1, 0, 2, 3)  # [batch, tokens, ...] to [tokens, batch, ...] and back


class Local(nn.Module):
    """Causal attention of [tokens, batch, heads, D], with tokens or the batch first."""

    def __init__(self, tokens_first, joined):
        super().__init__()
        self.tokens_first, self.joined = tokens_first, joined

    def forward(self, q, k, v, scale, causal=False):
        if self.tokens_first:
            q, k, v = (each.permute(FIRST) for each in (q, k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=True
        ).transpose(1, 2)
        out = out.permute(FIRST) if self.tokens_first else out
        return out.flatten(2) if self.joined else out


def drawn(shared):
    """Queries, keys, values and a gradient, [batch, tokens, heads, D]."""
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randn(ROWS, TOKENS, heads, WIDTH, generator=generator)
        for heads in (HEADS, shared, shared, HEADS)
    ]


def computed(module, tensors, call):
    """The output and the gradients of queries, keys and values."""
    given = [each.detach().clone().requires_grad_() for each in tensors[:3]]
    out = call(module, *given)
    out.backward(tensors[3].reshape(out.shape))
    return [out.detach(), *(each.grad for each in given)]


# tokens first, ranks, heads of keys and values, output joined
OWN = [(True, 2, HEADS, False), (False, 4, 2, True)]


@in_one_item(OWN)
def test_own_attention_as_in_one_process(case):
    tokens_first, size, shared, joined = case
    order, at = (FIRST, 0) if tokens_first else ((0, 1, 2, 3), 1)
    whole = [each.permute(order) for each in drawn(shared)]

    def rank(number):
        sequence = hf_zero.sequence_parallel(size)
        module = DistributedAttention(Local(tokens_first, joined), sequence.group, gather_idx=at)
        parts = [each.chunk(size, at)[number] for each in whole]
        found = computed(
            module, parts, lambda m, q, k, v: m(q, k, v, 1 - at, None, 0.3, causal=True)
        )
        return found, sequence.stats.counts["all_to_all"]

    want = computed(
        Local(tokens_first, joined), whole, lambda m, q, k, v: m(q, k, v, 0.3, causal=True)
    )
    got = run_ranks(size, rank)
    for each, value in enumerate(want):
        torch.testing.assert_close(torch.cat([found[each] for found, _ in got], at), value)
    assert [sent for _, sent in got] == [4] * size  # two, and two in the backward


def test_what_is_refused():
    def rank(_):
        with pytest.raises(ConfigError, match="not the group of this job"):
            DistributedAttention(Local(True, False), dist.group.WORLD)
        module = DistributedAttention(Local(True, False), hf_zero.sequence_parallel(2).group)
        q, k, v, _ = drawn(HEADS)
        with pytest.raises(ConfigError, match="rotate queries and keys before"):
            module(q, k, v, 1, (q, q), 1.0)
        with pytest.raises(ConfigError, match="queries of 3 dimensions"):
            module(q[0], k[0], v[0], 1, None, 1.0)
        with pytest.raises(ConfigError, match="does not divide 3 attention heads"):
            module(q[:, :, :3], k[:, :, :3], v[:, :, :3], 1, None, 1.0)

    run_ranks(2, rank)
    config = {"tiled_mlp": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
    with pytest.raises(ConfigError, match="no block of Stack"):
        hf_zero.initialize(model=Stack(), config=config)


def test_arguments_of_distributed_attention():
    for given in ((None,), (F.relu, None, 1, 1), (F.relu, None, 2, 4), (F.relu, None, "2", 0)):
        with pytest.raises(ConfigError, match=r"DistributedAttention.*pass an attention that can"):
            DistributedAttention(*given)
    assert DistributedAttention(F.relu, None, -2, 1).scatter_idx == -2


class GatedMLP(nn.Module):
    """An MLP with a second argument, and ``hidden`` wherever it is given."""

    def __init__(self):
        super().__init__()
        self.layer, self.most, self.pairs = nn.Linear(4, 4), 0, False

    def forward(self, hidden, gate=None):
        self.most = max(self.most, hidden.shape[1])
        output = self.layer(hidden) * (1 if gate is None else gate)
        return (output, gate) if self.pairs else output


class Gated(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.layers, self.call = nn.ModuleList(GatedMLP() for _ in range(2)), call

    def forward(self, x):
        for layer in self.layers:
            x = x + self.call(layer, x)
        return x


def test_tiles_are_as_many_as_are_written():
    model = seeded(lambda: Gated(lambda layer, x: layer(x)))
    tiles = list[int]()
    model.layers[0].layer.register_forward_hook(lambda _, args, out: tiles.append(out.shape[1]))
    config = {"tiled_mlp": {"enabled": True, "shards": 3}, "train_micro_batch_size_per_gpu": 1}
    engine = start(model, plain_sgd(model), config | {"zero_optimization": {"stage": 0}})
    with torch.no_grad():
        engine(torch.randn(2, 4, 4))
    assert tiles == [2, 1, 1]
    engine.destroy()


def test_mlps_are_called_by_keyword_or_with_more_than_tokens():
    """The latter is refused by the class, and no MLP runs on all tokens in silence. What is not one
    tensor cannot be joined.
    """
    config = {
        "tiled_mlp": {"enabled": True, "shards": 3}, "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 0},
    }  # fmt: skip
    x = torch.randn(2, 9, 4)

    def run(call, enabled=True, x=x, pairs=False):
        model = seeded(lambda: Gated(call))
        for layer in model.layers:
            layer.pairs = pairs
        section = {"tiled_mlp": {**config["tiled_mlp"], "enabled": enabled}}
        engine = start(model, plain_sgd(model), config | section)
        out = engine(x)
        engine.destroy()
        return out, model.layers[0].most

    by_name = lambda layer, x: layer(hidden=x, gate=None)  # noqa: E731
    (got, most), (want, _) = run(by_name), run(by_name, enabled=False)
    torch.testing.assert_close(got, want)
    assert most == 3
    for call in (lambda layer, x: layer(x, x), lambda layer, x: layer(x, gate=x)):
        with pytest.raises(ConfigError, match="tokens of GatedMLP, which is called with 2"):
            run(call)
    got, most = run(by_name, x=x[:, :0])
    assert got.shape == (2, 0, 4) and most == 0
    with pytest.raises(ConfigError, match=r"what GatedMLP returns .* a tuple"):
        run(lambda layer, x: layer(x)[0], pairs=True)


def test_tokens_of_whole_batches_are_counted_once():
    """By TRL's trainer, on four ranks in groups of two."""
    ids, mask = torch.ones(2, 8, dtype=torch.long), torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    labels = ids.where(mask > 0, -100)
    part = batches.cut({"input_ids": ids, "attention_mask": mask, "labels": labels}, 1, Division(2))
    trainer: Any = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", gather=lambda own: own.repeat(4)),
        get_tp_size=lambda: 1,
        get_sp_size=lambda: 2,
        _total_train_tokens=10,
        _metrics={"train": {}},
    )

    def count_theirs(inputs):
        with counting_whole_batches(trainer, inputs):
            trainer._total_train_tokens += 8
        return int(trainer._total_train_tokens)

    assert count_theirs(part) == 10 + 2 * 13
    assert trainer._metrics["train"]["num_tokens"] == [36]
    assert count_theirs({"input_ids": ids}) == 36 + 8  # whole sequences


def test_a_batch_of_inference_tensors_is_cut():
    with torch.inference_mode():
        part = batches.cut({"input_ids": torch.zeros(2, 8, dtype=torch.long)}, 0, Division(2))
    positions = part["position_ids"]
    assert positions.is_inference() and batches.are_counted(positions)
    assert batches.documents_of(positions) == Documents.one_a_row(8)


# The reason, and the model types.
_REASONS = {
    "it has layers of linear_attention": "bailing_hybrid bamba falcon_mamba granitemoehybrid jamba "
    "kimi_linear lara_mini mamba mamba2 minimax nemotron_h olmo_hybrid qwen3_5_moe_text "
    "qwen3_5_text qwen3_next recurrent_gemma",
    "it has layers of": "axk2 deepseek_v32 deepseek_v4 dots3_note_text falcon_h1 glm_moe_dsa hy_v4 "
    "inkling2_loop_text inkling2_text inkling_text lfm2_moe lfm3 llama4_text qwen4_exp_text zaya",
    "attends in both directions": "bart bigbird_pegasus blenderbot blenderbot-small marian mbart "
    "pegasus plbart whisper",
    "outside transformers' AttentionInterface": "big_bird bloom cpmant falcon gpt_neo "
    "gpt_neox_japanese megatron-bert mvp openai-gpt prophetnet rembert roformer rwkv trocr xglm "
    "xlm xlnet",
    "it has eager attention alone, or none": "xlstm",
    "it soft-caps its scores; set attn_logit_softcapping to None": "gemma2 vaultgemma",
    "computes a mask of its own": "doge",
}
REFUSED = {kind: reason for reason, kinds in _REASONS.items() for kind in kinds.split()}
# The helper does not know how to make them small.
UNKNOWN = ("reformer", "zamba", "zamba2")
DIVISIONS = (Division(context=2), Division(context=4), Division(2, 2), Division(2))
# A mechanism each: windows beside whole layers, shared keys, latent attention, positions that
# embeddings count, a bias of keys, attention sinks; and a reason each.
SOON = {
    *("gemma3_text", "gemma3n_text", "deepseek_v3", "roberta", "gpt2", "gpt_oss"),
    *("mamba", "bart", "bloom", "gemma2", "doge"),
}

pytest_generate_tests = by_model_type(SOON, without=UNKNOWN)


def shared(model, batch, division):
    """The losses of ranks that share ``batch``, and the gradients as the engine averages them."""
    copies = [copy.deepcopy(model) for _ in range(division.ranks)]

    def on_rank(rank):
        sequence = hf_zero.sequence_parallel(
            division.sequence, context_parallel_size=division.context
        )
        sequence_attention.install(copies[rank], sequence)
        part = sequence.shard(batch)
        loss = sequence.mean_loss(copies[rank](**part).loss, part["labels"])
        loss.backward()
        named = copies[rank].named_parameters()
        return float(loss.detach()), {name: p.grad for name, p in named if p.grad is not None}

    losses, gradients = zip(*run_ranks(division.ranks, on_rank))
    names = dict.fromkeys(name for each in gradients for name in each)
    return [*losses], {
        name: sum(each[name] for each in gradients if name in each) / division.ranks
        for name in names
    }


def test_every_model_type(model_type):
    model, batch = tiny(model_type), batch_of()
    if model_type in REFUSED:
        for division in DIVISIONS:
            with pytest.raises(ConfigError, match=REFUSED[model_type]) as raised:
                sequence_attention.check(model, division)
            assert str(raised.value).startswith(f"{division} cannot split {type(model).__name__}")
            assert str(raised.value).endswith(f"set {division.key} to 1")
        return
    loss, gradients = loss_and_gradients(copy.deepcopy(model), batch)
    for division in DIVISIONS:
        sequence_attention.check(model, division)
        got, found = shared(model, batch, division)
        assert got == pytest.approx([loss] * division.ranks, rel=1e-5)
        compare_tensors("gradient", found, gradients, tolerance=1e-4, floor=1e-6)
