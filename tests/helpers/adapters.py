"""A small model and the kinds of adapters that PEFT puts on it, which keep their own tensors in
different ways.
"""

from __future__ import annotations

from typing import Any

import peft
from transformers import LlamaConfig, LlamaForCausalLM

TARGETS = ["q_proj", "v_proj"]
KINDS: dict[str, Any] = {
    "LoRA": lambda: peft.LoraConfig(r=2, target_modules=TARGETS),
    "DoRA": lambda: peft.LoraConfig(r=2, target_modules=TARGETS, use_dora=True),
    "LoRA and a module saved whole": lambda: peft.LoraConfig(
        r=2, target_modules=TARGETS, modules_to_save=["lm_head"]
    ),
    "LoRA on the embedding": lambda: peft.LoraConfig(
        r=2, target_modules=[*TARGETS, "embed_tokens"]
    ),
    "LoRA and some tokens": lambda: peft.LoraConfig(
        r=2, target_modules=TARGETS, trainable_token_indices=[1, 5]
    ),
    "AdaLoRA": lambda: peft.AdaLoraConfig(
        init_r=4, target_r=2, total_step=10, target_modules=TARGETS
    ),
    "VeRA": lambda: peft.VeraConfig(r=2, target_modules=["q_proj"]),
    "IA3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "LoHa": lambda: peft.LoHaConfig(r=2, target_modules=TARGETS),
    "OFT": lambda: peft.OFTConfig(oft_block_size=4, target_modules=TARGETS),
}


def llama(tied: bool = False) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            tie_word_embeddings=tied,
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )
