"""Tiny models that are real: four transformers architectures, built from their own configs, and
small hand-written ones.

Everything is seeded and free of dropout, so that a forward depends on weights and batch alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

VOCAB, HIDDEN, LAYERS, HEADS = 67, 32, 2, 4
ROWS, LENGTH = 2, 9  # odd on purpose: a batch is [ROWS, LENGTH] tokens

Batch = dict[str, Any]

_generator = threading.RLock()  # ranks that are threads share torch's generator


def seed_of(step: int, micro: int, rank: int) -> int:
    return 10_000 * step + 100 * micro + rank + 17


def tokens(step: int, micro: int, rank: int, rows: int = ROWS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed_of(step, micro, rank))
    return torch.randint(3, VOCAB, (rows, LENGTH), generator=generator)


def floats(step: int, micro: int, rank: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed_of(step, micro, rank))
    return torch.randn(shape, generator=generator)


def _masked(step: int, micro: int, rank: int) -> Batch:
    ids = tokens(step, micro, rank)
    labels = ids.clone()
    labels[:, ::3] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def _causal(step: int, micro: int, rank: int) -> Batch:
    ids = tokens(step, micro, rank)
    return {"input_ids": ids, "labels": ids.clone()}


def seq2seq(step: int, micro: int, rank: int) -> Batch:
    return {
        "input_ids": tokens(step, micro, rank),
        "labels": tokens(step, micro, rank + 50)[:, :5].contiguous(),
    }


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=2 * HIDDEN,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=0.2,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        initializer_range=0.2, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN + 3,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=2, max_position_embeddings=16, initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=HIDDEN, d_kv=8, d_ff=2 * HIDDEN, num_layers=LAYERS,
        num_heads=HEADS, dropout_rate=0.0,
        relative_attention_num_buckets=8, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


@dataclass(frozen=True)
class Architecture:
    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Batch]

    def build(self) -> nn.Module:
        return seeded(self.make)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """``make()`` in fp32 and training mode, with parameters that depend on nothing but ``make``."""
    with _generator:
        state = torch.get_rng_state()
        torch.manual_seed(1234)
        try:
            return make().float().train()
        finally:
            torch.set_rng_state(state)


ARCHITECTURES = {
    a.name: a
    for a in (
        Architecture("bert", bert, _masked),
        Architecture("gpt2", gpt2, _causal),
        Architecture("llama", llama, _causal),
        Architecture("t5", t5, seq2seq),
    )
}


class Block(nn.Module):
    """A residual block over [rows, width]."""

    def __init__(self, width: int = HIDDEN) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """An input layer, ``depth`` blocks called by :meth:`body` (which odd cases override), a
    head; [rows, 7] -> [rows, 5].
    """

    def __init__(self, depth: int = 3, width: int = HIDDEN) -> None:
        super().__init__()
        self.enter = nn.Linear(7, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 5)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.enter(x)))


def features(step: int, micro: int, rank: int, rows: int = 3) -> torch.Tensor:
    """The input of a :class:`Stack`: [rows, 7]."""
    return floats(step, micro, rank, rows, 7)
