"""Every causal model type that transformers knows, by itself: tiny, with random weights, without
draws in a forward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from hf_zero.parallel.tensor.styles import FAMILIES
from tests.helpers.cells import runs_long

VOCAB = 96
# By the names of the fields that configurations have.
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"max_position_embeddings": 64, "sliding_window": 6, "pad_token_id": 0, "bos_token_id": 1},
    **{"eos_token_id": 2, "initializer_range": 0.15, "use_cache": False, "is_decoder": True},
    **{"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "query_pre_attn_scalar": 8},
    # mixtures of experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("ffn_hidden_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"), 1),
    **{"decoder_sparse_step": 1, "zero_expert_num": 2, "mlp_only_layers": []},
    # latent attention, and an index of it
    **{"kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8},
    **{"v_head_dim": 8, "index_n_heads": 4, "index_head_dim": 8, "index_topk": 64},
    **{"o_lora_rank": 4, "o_groups": 2},
    # states and convolutions
    **{"mamba_d_state": 4, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1},
    **{"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1},
    **{"mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 8, "chunk_size": 8},
    **{"mamba_dt_rank": 4, "use_mamba_kernels": False, "conv_L_cache": 3, "block_ff_dim": 64},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 8, "block_auto_adjust_ff_dim": False, "laurel_rank": 4},
    # others
    **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "num_layers": 1},
    **{"num_kv_shared_layers": 0},
}  # fmt: skip
DECODER = {
    **{"d_model": 32, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "decoder_layers": 2},
    **{"encoder_attention_heads": 4, "encoder_layers": 2},
}  # fmt: skip
# What these need beside, or otherwise.
OTHERS: dict[str, dict[str, Any]] = {
    "gemma3n_text": {"intermediate_size": [64, 64], "activation_sparsity_pattern": [0.0, 0.0]},
    "llama4_text": {"intermediate_size_mlp": 48, "num_experts_per_tok": 1},
    "granitemoehybrid": {"shared_intermediate_size": 32},
    "dbrx": {
        **{"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {
            **{"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}
        },
    },
    "zaya": {"num_experts_per_tok": 1},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "dots3_note_text": {
        "per_layer_config": {},
        "head_dim": 12,
        "shared_experts_intermediate_size": 16,
    },
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "gpt_neo": {
        **{"num_layers": 2, "num_heads": 4, "window_size": 4},
        "attention_types": [[["global", "local"], 1]],
    },
    "plbart": DECODER,
    "whisper": DECODER,
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "xlnet": {"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "bamba": {"attn_layer_indices": [1]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "qwen4_exp_text": {
        **{"indexer_budget": 8, "indexer_compress_ratio": 2, "indexer_n_heads": 4},
        **{"indexer_kv_heads": 1, "indexer_head_dim": 8},
    },
}


def model_types(with_plan: bool = False) -> list[str]:
    """Return the causal model types with a single configuration; the text model inside a multimodal
    one has a type of its own. ``with_plan``: only types that have a tensor-parallel plan.
    """
    return [
        name
        for name, kind in CONFIG_MAPPING.items()
        if kind in MODEL_FOR_CAUSAL_LM_MAPPING
        and not kind.sub_configs
        and (not with_plan or name in FAMILIES or getattr(kind, "base_model_tp_plan", None))
    ]


def by_model_type(
    soon: Collection[str], without: Collection[str] = (), with_plan: bool = False
) -> Callable[[pytest.Metafunc], None]:
    """Return a ``pytest_generate_tests`` that gives tests their argument ``model_type``: those of
    ``soon``, and in the long suite all of :func:`model_types`, whose import takes seconds.
    """

    def generate(metafunc: pytest.Metafunc) -> None:
        if "model_type" in metafunc.fixturenames:
            kinds = model_types(with_plan) if runs_long(metafunc.config) else sorted(soon)
            left = [kind for kind in kinds if kind not in without]
            assert set(soon) <= set(left)
            marked = [pytest.param(kind, marks=pytest.mark.long) for kind in left]
            chosen = [kind if kind in soon else row for kind, row in zip(left, marked)]
            metafunc.parametrize("model_type", chosen)

    return generate


def tiny_config(name: str, **more: Any) -> Any:
    kind = CONFIG_MAPPING[name]
    fields = {each.name for each in dataclasses.fields(kind)}
    fields |= set(getattr(kind, "attribute_map", {}))
    sizes = {key: value for key, value in SIZES.items() if key in fields}
    if "qk_rope_head_dim" in fields:
        sizes |= {"head_dim": 4, "num_key_value_heads": 4}
    plain: Any = kind()
    kinds = list(dict.fromkeys(getattr(plain, "layer_types", None) or ()))
    own = getattr(kind, getattr(kind, "attribute_map", {}).get("layer_types", "layer_types"), None)
    if kinds and "layer_types" in fields and not isinstance(own, property):  # which is computed
        sizes["num_hidden_layers"] = max(2, len(kinds))
        sizes["layer_types"] = (kinds * 2)[: max(2, len(kinds))]
    made = kind(**{**sizes, **OTHERS.get(name, {}), **more})
    for key, value in vars(made).items():
        if isinstance(value, float) and ("drop" in key or "jitter" in key or "pdrop" in key):
            setattr(made, key, 0.0)
    return made


def tiny(name: str, **more: Any) -> Any:
    """A model, in training, whose parameters are none of them zero or one."""
    torch.manual_seed(0)
    config = tiny_config(name, **more)
    model: nn.Module = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).float().train()
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.05)
    return model


def batch_of(rows: int = 2, tokens: int = 16, seed: int = 1) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 60, (rows, tokens), generator=draw)
    return {"input_ids": ids, "labels": ids}
