"""Tiny models of many types with random weights, saved as the hub keeps them: in several files,
in the hub's layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GQA = {**TEXT, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
PAIR = {
    **{
        "vocab_size": 99,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
    },
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
}
IMAGE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
SOUND = {
    **{
        **TEXT,
        "vocab_size": 32,
        "conv_dim": [16, 16],
        "conv_stride": [5, 2],
        "conv_kernel": [10, 3],
    },
    **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2},
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


@dataclass(frozen=True)
class Animal:
    """A model class of transformers by name, its configuration class, and what the configuration
    is made with.
    """

    model: str
    config: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def cls(self) -> Any:
        import transformers

        return getattr(transformers, self.model)

    def build(self) -> Any:
        """The model with random weights, other than its own initialisation gives; the same at
        every call.
        """
        import transformers

        model = self.cls(getattr(transformers, self.config)(**self.options))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                if tensor.is_floating_point():
                    tensor.copy_(torch.rand(tensor.shape, generator=generator) * 0.1 + 0.01)
        return model


ZOO: dict[str, Animal] = {
    # encoders
    "bert": Animal("BertForMaskedLM", "BertConfig", TEXT),
    "roberta": Animal("RobertaForSequenceClassification", "RobertaConfig", TEXT),
    # decoders
    "gpt2": Animal(
        "GPT2LMHeadModel", "GPT2Config", {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4}
    ),
    "llama": Animal("LlamaForCausalLM", "LlamaConfig", GQA),
    "qwen2": Animal("Qwen2ForCausalLM", "Qwen2Config", {**GQA, "tie_word_embeddings": True}),
    # mixtures of experts, merged on loading
    "mixtral": Animal("MixtralForCausalLM", "MixtralConfig", {**GQA, "num_local_experts": 4}),
    "deepseek_v3": Animal(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **TEXT,
            **LATENT,
            "n_routed_experts": 4,
            "moe_intermediate_size": 24,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
        }
        | {"num_key_value_heads": 4, "first_k_dense_replace": 1},
    ),
    # encoder-decoder
    "t5": Animal(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    ),
    # images
    "resnet": Animal(
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1]},
    ),
    # sound
    "wav2vec2": Animal("Wav2Vec2ForCTC", "Wav2Vec2Config", SOUND),
    # several kinds in one
    "clip": Animal(
        "CLIPModel",
        "CLIPConfig",
        {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 16},
    ),
    # state spaces
    "mamba": Animal(
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 99, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2},
    ),
}

MORE: dict[str, Animal] = {
    "albert": Animal("AlbertForMaskedLM", "AlbertConfig", {**TEXT, "embedding_size": 16}),
    "gpt_oss": Animal(
        "GptOssForCausalLM",
        "GptOssConfig",
        {**GQA, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "vit": Animal("ViTForImageClassification", "ViTConfig", IMAGE),
    "llava": Animal(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": {**GQA, "model_type": "llama"},
            "vision_config": {**IMAGE, "model_type": "clip_vision_model"},
        }
        | {"image_token_index": 98},
    ),
    "modernbert": Animal(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**TEXT, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1},
    ),
    "opt": Animal(
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": 99,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 16,
        },
    ),
    "gemma2": Animal("Gemma2ForCausalLM", "Gemma2Config", {**GQA, "head_dim": 8}),
    "phi3": Animal("Phi3ForCausalLM", "Phi3Config", {**GQA, "pad_token_id": 0}),
    "qwen3_moe": Animal("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**GQA, **EXPERTS, "head_dim": 8}),
    "bart": Animal("BartForConditionalGeneration", "BartConfig", PAIR),
    "swin": Animal(
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 4],
            "window_size": 4,
        },
    ),
    "whisper": Animal(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **PAIR,
            "num_mel_bins": 8,
            "max_source_positions": 20,
            "max_target_positions": 20,
            "pad_token_id": 1,
            "bos_token_id": 2,
        }
        | {"eos_token_id": 3, "decoder_start_token_id": 4},
    ),
    "qwen2_vl": Animal(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {
            "text_config": {
                **GQA,
                "rope_parameters": {
                    "rope_type": "default",
                    "mrope_section": [1, 1, 2],
                    "rope_theta": 10000.0,
                },
            },
            "vision_config": {
                "embed_dim": 32,
                "hidden_size": 32,
                "depth": 2,
                "num_heads": 4,
                "patch_size": 4,
            },
        },
    ),
    "jamba": Animal(
        "JambaForCausalLM",
        "JambaConfig",
        {
            **GQA,
            "num_experts": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        }
        | {"use_mamba_kernels": False, "mamba_d_state": 8, "mamba_dt_rank": 4},
    ),
    "deberta-v2": Animal("DebertaV2ForSequenceClassification", "DebertaV2Config", TEXT),
    "electra": Animal("ElectraForPreTraining", "ElectraConfig", {**TEXT, "embedding_size": 16}),
    "distilbert": Animal(
        "DistilBertForTokenClassification",
        "DistilBertConfig",
        {"vocab_size": 99, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    ),
    "gpt_neox": Animal("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT),
    "bloom": Animal(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
    "mistral": Animal("MistralForCausalLM", "MistralConfig", GQA),
    "qwen3": Animal("Qwen3ForCausalLM", "Qwen3Config", {**GQA, "head_dim": 8}),
    "gemma3": Animal("Gemma3ForCausalLM", "Gemma3TextConfig", {**GQA, "head_dim": 8}),
    "falcon": Animal("FalconForCausalLM", "FalconConfig", TEXT),
    "qwen2_moe": Animal(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**GQA, **EXPERTS, "shared_expert_intermediate_size": 24},
    ),
    "olmoe": Animal(
        "OlmoeForCausalLM",
        "OlmoeConfig",
        {**TEXT, "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "ernie4_5_moe": Animal(
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        {
            **GQA,
            "moe_intermediate_size": 24,
            "moe_k": 2,
            "moe_num_experts": 4,
            "moe_layer_start_index": 0,
        },
    ),
    "marian": Animal(
        "MarianMTModel", "MarianConfig", {**PAIR, "pad_token_id": 1, "decoder_start_token_id": 1}
    ),
    "convnext": Animal(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2},
    ),
    "dinov2": Animal("Dinov2Model", "Dinov2Config", IMAGE),
    "segformer": Animal(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [16, 32],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
        }
        | {"num_attention_heads": [2, 4], "mlp_ratios": [2, 2], "decoder_hidden_size": 16},
    ),
    "hubert": Animal("HubertModel", "HubertConfig", SOUND),
    "siglip": Animal("SiglipModel", "SiglipConfig", {"text_config": TEXT, "vision_config": IMAGE}),
    "blip": Animal(
        "BlipForConditionalGeneration",
        "BlipConfig",
        {
            "text_config": {**TEXT, "encoder_hidden_size": 32},
            "vision_config": IMAGE,
            "projection_dim": 16,
        },
    ),
    "mamba2": Animal(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "vocab_size": 99,
            "hidden_size": 32,
            "state_size": 8,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 1,
        },
    ),
    "rwkv": Animal(
        "RwkvForCausalLM",
        "RwkvConfig",
        {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2},
    ),
    "falcon_h1": Animal(
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {**GQA, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    ),
}

LOGITS = ("bert", "gpt2", "llama", "qwen2", "mixtral", "mamba", "vit")
"""Those whose outputs are compared as well."""


def animal(name: str) -> Animal:
    return ZOO[name] if name in ZOO else MORE[name]


def save(names: Iterable[str], folder: Path) -> None:
    """Save each model in three files or more, under its name."""
    for name in names:
        model = animal(name).build()
        size = sum(parameter.nbytes for parameter in model.parameters())
        model.save_pretrained(folder / name, max_shard_size=size // 3)


def inputs(name: str) -> dict[str, torch.Tensor]:
    if name == "vit":
        return {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)}
    return {"input_ids": torch.arange(2 * 8).view(2, 8) * 7 % 90 + 5}
