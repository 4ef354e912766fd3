"""Tiny language models of every class that has a fused head, and batches for them with padding
and ignored labels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY = 67
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8}
_STILL = {**_SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}

CAUSAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "llama, tied": ("LlamaForCausalLM", "LlamaConfig", {**_GROUPED, "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", "MistralConfig", _GROUPED),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**_SIZES, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _GROUPED),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", _GROUPED),
    "gemma2, capped": ("Gemma2ForCausalLM", "Gemma2Config", {**_GROUPED,
    "final_logit_softcapping": 3.0}),
    "gemma3, capped": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_GROUPED,
    "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", _GROUPED),
    "phi": ("PhiForCausalLM", "PhiConfig", _SIZES),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**_SIZES, "num_key_value_heads": 2}),
    "mixtral, with its routers' loss": (
        "MixtralForCausalLM", "MixtralConfig",
        {**_GROUPED, "num_local_experts": 4, "output_router_logits": True,
        "router_aux_loss_coef": 0.3},
    ),
    "gpt2": (
        "GPT2LMHeadModel", "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **_ENDS},
    ),
    "granite, scaled": ("GraniteForCausalLM", "GraniteConfig", {**_SIZES, "num_key_value_heads": 2,
    "logits_scaling": 3.0}),
    "cohere, scaled": ("CohereForCausalLM", "CohereConfig", {**_SIZES, "num_key_value_heads": 2,
    "logit_scale": 0.3}),
    "cohere2, scaled": ("Cohere2ForCausalLM", "Cohere2Config", {**_GROUPED, "logit_scale": 0.3}),
}  # fmt: skip
MASKED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", _STILL),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", _STILL),
    "deberta-v2": ("DebertaV2ForMaskedLM", "DebertaV2Config", _STILL),
    "distilbert": (
        "DistilBertForMaskedLM", "DistilBertConfig",
        {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48,
        "max_position_embeddings": 32, "dropout": 0.0, "attention_dropout": 0.0},
    ),
}  # fmt: skip
SEQ2SEQ: dict[str, tuple[str, str, dict[str, Any]]] = {
    f"t5{', untied' * untied}": (
        "T5ForConditionalGeneration", "T5Config",
        {
            "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
            "num_heads": 4, "dropout_rate": 0.0,
            "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
            "tie_word_embeddings": not untied, "scale_decoder_outputs": not untied,
        },
    )
    for untied in (False, True)
}  # fmt: skip
LANGUAGES = {**CAUSAL, **MASKED, **SEQ2SEQ}


def build(name: str) -> Any:
    """The model of that name in training mode, the same one at each call, with biases and norms
    that are not 0 and 1.
    """
    model, config, options = LANGUAGES[name]
    torch.manual_seed(1234)
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options)).train()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return made


def pair(name: str) -> tuple[Any, Any]:
    """Two models alike."""
    model = build(name)
    return model, copy.deepcopy(model)


def batch(seed: int = 0, rows: int = 2, length: int = 9) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, length - 3 :] = 0
    labels = ids.where((torch.rand(rows, length, generator=generator) < 0.6) & mask.bool(), -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.float().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def compare(
    found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], tolerance: float = 1e-5
) -> None:
    """Every gradient within ``tolerance`` of the largest one of its model (a key's bias has a
    gradient of rounding alone).
    """
    assert found.keys() == exact.keys()
    largest = max(float(each.abs().max()) for each in exact.values())
    off: Callable[[str], float] = lambda name: float((found[name] - exact[name]).abs().max())  # noqa: E731
    errors = {
        name: off(name)
        for name in exact
        if off(name) > tolerance * (largest * 0.01 + float(exact[name].abs().max()))
    }
    assert not errors, errors
