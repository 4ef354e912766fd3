"""Jobs over long sequences: plainly over whole ones, and on ranks that read parts of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

import hf_zero
from hf_zero.zero.layout.box import Box
from tests.helpers.engines import OnEngine, config_of, start
from tests.helpers.models import HEADS, HIDDEN, LAYERS, ROWS, VOCAB, Batch, seed_of, seeded
from tests.helpers.ranks import run_ranks
from tests.helpers.tensor_parallel import boxes_of, put_together
from tests.helpers.training import At, Driver, Job, Plan, Trace, merge, sgd, train

TOKENS = 16
WORDS = VOCAB + 1  # ranks that share layers divide them


def llama(kv_heads: int = 2, **more: Any) -> nn.Module:
    """Tied if ``tie_word_embeddings``; ``kv_heads`` heads of keys and values."""
    chosen = {
        "num_attention_heads": HEADS, "max_position_embeddings": 2 * TOKENS,
        "tie_word_embeddings": False, **more,
    }  # fmt: skip
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS, num_key_value_heads=kv_heads, initializer_range=0.2,
        pad_token_id=2, **chosen,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def qwen3(**more: Any) -> nn.Module:
    """With norms of queries and keys, and tied."""
    config = transformers.Qwen3Config(
        vocab_size=WORDS, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=2, head_dim=8,
        max_position_embeddings=2 * TOKENS, initializer_range=0.2, tie_word_embeddings=True,
        pad_token_id=2, **more,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=WORDS, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=2,
        max_position_embeddings=2 * TOKENS, initializer_range=0.2, num_local_experts=4,
        pad_token_id=2,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def gpt2(**more: Any) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=2 * TOKENS,
        initializer_range=0.2, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **more},
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def plain(at: At) -> Batch:
    """Sequences whose prompts, of a length that differs, have no labels."""
    generator = torch.Generator().manual_seed(seed_of(at.step, at.micro, at.rank))
    ids = torch.randint(3, VOCAB, (ROWS, TOKENS), generator=generator)
    labels = ids.clone()
    labels[:, : 3 + 4 * (at.micro + at.rank)] = -100  # more than some ranks read
    return {"input_ids": ids, "labels": labels}


def packed(at: At) -> Batch:
    """Documents one behind another, other ones in each row, one of them of one token."""
    batch = plain(at)
    lengths = [[5, 1, 7, 3], [9, 7]]
    rows = [torch.cat([torch.arange(length) for length in row]) for row in lengths]
    return batch | {"position_ids": torch.stack(rows)}


def padded(at: At) -> Batch:
    """Rows of other lengths, padded on the right; in one of them a rank reads padding alone."""
    batch = plain(at)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 7 - at.micro :] = 0
    mask[1, 13:] = 0
    ids = batch["input_ids"].masked_fill(mask == 0, 2)
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def half_labeled(at: At) -> Batch:
    """No token of the second half has a label: of two ranks one has no loss."""
    batch = plain(at)
    batch["labels"][:, TOKENS // 2 :] = -100
    batch["labels"][:, : TOKENS // 4] = batch["input_ids"][:, : TOKENS // 4]
    return batch


@dataclass
class SequenceJob(Job):
    """A causal model over ``batch(at)``; where ranks read parts of it, ``fault`` changes what a
    rank does with its loss and its batch.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[At], Batch] = plain
    fault: Callable[[Any, Batch], Batch] = lambda sequence, batch: batch
    factor: Callable[[Any], float] = lambda sequence: 1.0

    def build(self) -> nn.Module:
        return seeded(self.make)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return sgd(model)

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        batch, sequence = self.batch(at), net.memory.get("sequence")
        if sequence is None:
            return net(**batch).loss
        part = self.fault(sequence, sequence.shard(batch))
        mean = sequence.mean_loss(net(**part).loss, part["labels"])
        return mean.detach() + (mean - mean.detach()) * self.factor(sequence)


@dataclass(frozen=True)
class Ranks:
    """``sequence`` x ``context`` ranks read each sequence, and ``data`` groups of them different
    ones; each of them is ``tensor`` ranks that share the layers.
    """

    sequence: int
    data: int = 1
    tensor: int = 1
    context: int = 1

    @property
    def world(self) -> int:
        return self.alike * self.data

    @property
    def alike(self) -> int:
        """Ranks that train on one batch."""
        return self.sequence * self.context * self.tensor

    def __str__(self) -> str:
        others = {"tp": self.tensor, "cp": self.context}
        more = "".join(f"x{name}{size}" for name, size in others.items() if size > 1)
        return f"sp{self.sequence}xdp{self.data}{more}"


def on_rank(
    rank: int,
    models: list[nn.Module],
    job: Job,
    plan: Plan,
    ranks: Ranks,
    config: Any,
    opens: type[OnEngine] = OnEngine,
) -> tuple[Trace, Any, dict[str, Box]]:
    model = models[rank]
    if ranks.tensor > 1:  # the configuration says both
        engine = start(model, job.optimizer(model), config)
        sequence = hf_zero.sequence_parallel()
    else:
        sequence = hf_zero.sequence_parallel(ranks.sequence, context_parallel_size=ranks.context)
        engine = start(model, job.optimizer(model), config, mpu=sequence)
    boxes = boxes_of(model)
    session = opens(engine, plan)
    session.memory["sequence"] = sequence
    trace = train(session, job, plan, rank // ranks.alike)
    session.close()
    return trace, sequence.stats, boxes


def train_on_threads(
    job: Job, plan: Plan, ranks: Ranks, stage: int, opens: type[OnEngine] = OnEngine, **more: Any
) -> tuple[Trace, list[Any]]:
    """Merged records, and what each rank has sent along its sequences; ``plan.ranks`` are
    groups.
    """
    assert plan.ranks == ranks.data
    models = [job.build() for _ in range(ranks.world)]
    if ranks.tensor > 1:
        more["tensor_parallel"] = {"autotp_size": ranks.tensor}
        more |= {"sequence_parallel_size": ranks.sequence, "context_parallel_size": ranks.context}
    config = config_of(stage, plan, **more)
    results = run_ranks(ranks.world, on_rank, models, job, plan, ranks, config, opens)
    return merge(joined(results, ranks.tensor)), [stats for _, stats, _ in results]


def joined(results: Any, tensor: int) -> list[Trace]:
    """Traces with whole tensors, of each ``tensor`` ranks that hold parts of them."""
    if tensor == 1:
        return [trace for trace, *_ in results]
    made = []
    for at in range(0, len(results), tensor):
        group = results[at : at + tensor]
        boxes, first = [held for *_, held in group], group[0][0]
        grads = [
            put_together([trace.grads[step] for trace, *_ in group], boxes)
            for step in range(len(first.grads))
        ]
        weights = put_together([trace.weights for trace, *_ in group], boxes)
        made.append(Trace(first.losses, first.norms, grads, weights))
    return made
