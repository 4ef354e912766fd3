"""Small causal models of the families that ``pipeline_stages`` cuts, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
TYPES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 3},
    "qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
    "qwen3": {},
    "gemma": {},
    "phi3": {},
    "olmo2": {},
    "smollm3": {},
    "stablelm": {},
    "gpt2": {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32, "vocab_size": 32},
}


def model_of(kind):
    torch.manual_seed(3)
    given = TYPES[kind] if kind == "gpt2" else {**SMALL, **TYPES[kind]}
    made = AutoConfig.for_model(kind, **given)
    for name in ("embd_pdrop", "resid_pdrop", "attn_pdrop", "hidden_dropout", "attention_dropout"):
        if hasattr(made, name):
            setattr(made, name, 0.0)
    return AutoModelForCausalLM.from_config(made, attn_implementation="eager")


def batches_of(count):
    """Micro-batches with padding, masked labels, positions, and nothing of these."""
    draw, found = torch.Generator().manual_seed(1), []
    for number in range(count):
        ids = torch.randint(1, 32, (2, 5 + number % 3), generator=draw)
        batch = {"input_ids": ids, "labels": ids.clone()}
        if number % 2 == 0:
            batch["attention_mask"] = torch.ones_like(ids)
            batch["attention_mask"][1, -2:] = 0
            batch["labels"][1, -2:] = -100
        if number % 3 == 1:
            batch["position_ids"] = (torch.arange(ids.shape[1]) % 4).expand_as(ids)
        found.append(batch)
    return found
