"""What PEFT writes of a model is known without its values, for kinds of adapters that keep their own in different ways."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_zero.integrations.adapters import written as names_written

TARGETS = ["q_proj", "v_proj"]
KINDS: dict[str, Any] = {
    "LoRA": lambda: peft.LoraConfig(r=2, target_modules=TARGETS),
    "DoRA": lambda: peft.LoraConfig(r=2, target_modules=TARGETS, use_dora=True),
    "LoRA and a module saved whole": lambda: peft.LoraConfig(r=2, target_modules=TARGETS, modules_to_save=["lm_head"]),
    "LoRA on the embedding": lambda: peft.LoraConfig(r=2, target_modules=[*TARGETS, "embed_tokens"]),
    "LoRA and some tokens": lambda: peft.LoraConfig(r=2, target_modules=TARGETS, trainable_token_indices=[1, 5]),
    "AdaLoRA": lambda: peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=TARGETS),
    "VeRA": lambda: peft.VeraConfig(r=2, target_modules=["q_proj"]),
    "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LoHa": lambda: peft.LoHaConfig(r=2, target_modules=TARGETS),
    "OFT": lambda: peft.OFTConfig(oft_block_size=4, target_modules=TARGETS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_those_that_are_written(kind: str) -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
    )
    model = peft.get_peft_model(LlamaForCausalLM(config), KINDS[kind]())
    if kind == "LoRA":
        model.add_adapter("frozen", KINDS[kind]())
    marks = {name: torch.full_like(p, float(number)) for number, (name, p) in enumerate(model.named_parameters(remove_duplicate=False), 1)}
    buffers = {name: torch.zeros_like(b) for name, b in model.named_buffers(remove_duplicate=False)}
    written = {
        float(value.reshape(-1)[0])
        for adapter in model.peft_config
        for value in peft.get_peft_model_state_dict(model, {**marks, **buffers}, adapter_name=adapter).values()
    }
    want = {name for name, mark in marks.items() if float(mark.reshape(-1)[0]) in written}
    found = names_written(model)
    assert want <= found
    embeddings = {name for name in marks if "embed_tokens" in name or "lm_head" in name}
    assert found - want <= embeddings, "no more than what is written in some cases"
    assert any(p.requires_grad for name, p in model.named_parameters() if name in want)
    if kind == "LoRA":
        assert any(".frozen." in name for name in want)
