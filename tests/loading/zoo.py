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
MHA = {**TEXT, "num_key_value_heads": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LAYERS = dict.fromkeys(("encoder_layers", "decoder_layers"), 2)
WIDTHS = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48)
HEADS = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
PAIR = {"vocab_size": 99, "d_model": 32, **LAYERS, **WIDTHS, **HEADS}
PATCHES = {"image_size": 16, "patch_size": 8}
IMAGE = {**{name: value for name, value in TEXT.items() if name != "vocab_size"}, **PATCHES}
CONVOLUTIONS = {"conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3]}
POSITIONS = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
SOUND = {**TEXT, "vocab_size": 32, **CONVOLUTIONS, **POSITIONS}
LOW_RANK = {"q_lora_rank": 16, "kv_lora_rank": 16}
LATENT = {**LOW_RANK, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
STATES = {"vocab_size": 99, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
VISION = {"embed_dim": 32, "hidden_size": 32, "depth": 2, "num_heads": 4, "patch_size": 4}


@dataclass(frozen=True)
class Animal:
    """Names of a model class and a configuration class, and options of the latter."""

    model: str
    config: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def cls(self) -> Any:
        import transformers

        return getattr(transformers, self.model)

    def build(self) -> Any:
        """The model with random weights, the same at every call."""
        import transformers

        model = self.cls(getattr(transformers, self.config)(**self.options))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                if tensor.is_floating_point():
                    tensor.copy_(torch.rand(tensor.shape, generator=generator) * 0.1 + 0.01)
        return model


def of(kind: str, head: str, *parts: dict[str, Any], **options: Any) -> Animal:
    """The class ``kind`` with ``head``, and its configuration."""
    return Animal(
        f"{kind}{head}", f"{kind}Config", {k: v for p in parts for k, v in p.items()} | options
    )


CAUSAL, IMAGES = "ForCausalLM", "ForImageClassification"
GENERATION = "ForConditionalGeneration"
GATED = {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
ZOO: dict[str, Animal] = {
    # encoders
    "bert": of("Bert", "ForMaskedLM", TEXT),
    "roberta": of("Roberta", "ForSequenceClassification", TEXT),
    # decoders
    "gpt2": of("GPT2", "LMHeadModel", vocab_size=99, n_embd=32, n_layer=2, n_head=4),
    "llama": of("Llama", CAUSAL, GQA),
    "qwen2": of("Qwen2", CAUSAL, GQA, tie_word_embeddings=True),
    # mixtures of experts, merged on loading
    "mixtral": of("Mixtral", CAUSAL, GQA, num_local_experts=4),
    "deepseek_v3": of(
        "DeepseekV3", CAUSAL, MHA, LATENT, GATED, n_routed_experts=4, moe_intermediate_size=24
    ),
    # encoder-decoder
    "t5": of(
        "T5", GENERATION, vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4
    ),
    # images
    "resnet": of("ResNet", IMAGES, embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1]),
    # sound
    "wav2vec2": of("Wav2Vec2", "ForCTC", SOUND),
    # several kinds in one
    "clip": of("CLIP", "Model", text_config=TEXT, vision_config=IMAGE, projection_dim=16),
    # state spaces
    "mamba": of("Mamba", CAUSAL, STATES),
}

LLAVA = {"model_type": "clip_vision_model"}
TOKENS = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 4}
FRAMES = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20}
EVERY_SECOND = {"attn_layer_period": 2, "expert_layer_period": 2}
OFFSETS = {"attn_layer_offset": 1, "expert_layer_offset": 1}
STEPS = {"num_encoder_blocks": 2, "sr_ratios": [2, 1], "patch_sizes": [3, 3], "strides": [2, 2]}
STAGES = {"depths": [1, 1], "hidden_sizes": [16, 32]}
MORE: dict[str, Animal] = {
    "albert": of("Albert", "ForMaskedLM", TEXT, embedding_size=16),
    "gpt_oss": of("GptOss", CAUSAL, GQA, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
    "vit": of("ViT", IMAGES, IMAGE),
    "llava": of(
        "Llava",
        GENERATION,
        text_config={**GQA, "model_type": "llama"},
        vision_config={**IMAGE, **LLAVA},
        image_token_index=98,
    ),
    "modernbert": of(
        "ModernBert", "ForMaskedLM", TEXT, pad_token_id=0, bos_token_id=2, eos_token_id=1
    ),
    "opt": of(
        "OPT",
        CAUSAL,
        {name: TEXT[name] for name in TEXT if name != "intermediate_size"},
        ffn_dim=48,
        word_embed_proj_dim=16,
    ),
    "gemma2": of("Gemma2", CAUSAL, GQA, head_dim=8),
    "phi3": of("Phi3", CAUSAL, GQA, pad_token_id=0),
    "qwen3_moe": of("Qwen3Moe", CAUSAL, GQA, EXPERTS, head_dim=8),
    "bart": of("Bart", GENERATION, PAIR),
    "swin": of(
        "Swin",
        IMAGES,
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "window_size": 4},
        depths=[1, 1],
        num_heads=[2, 4],
    ),
    "whisper": of("Whisper", GENERATION, PAIR, FRAMES, TOKENS),
    "qwen2_vl": of(
        "Qwen2VL", GENERATION, text_config={**GQA, "rope_parameters": ROPE}, vision_config=VISION
    ),
    "jamba": of(
        "Jamba",
        CAUSAL,
        {**GQA, **EVERY_SECOND, **OFFSETS, "num_experts": 4},
        use_mamba_kernels=False,
        mamba_d_state=8,
        mamba_dt_rank=4,
    ),
    "deberta-v2": of("DebertaV2", "ForSequenceClassification", TEXT),
    "electra": of("Electra", "ForPreTraining", TEXT, embedding_size=16),
    "distilbert": of(
        "DistilBert",
        "ForTokenClassification",
        {"vocab_size": 99, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    ),
    "gpt_neox": of("GPTNeoX", CAUSAL, TEXT),
    "bloom": of("Bloom", CAUSAL, vocab_size=99, hidden_size=32, n_layer=2, n_head=4),
    "mistral": of("Mistral", CAUSAL, GQA),
    "qwen3": of("Qwen3", CAUSAL, GQA, head_dim=8),
    "gemma3": Animal("Gemma3ForCausalLM", "Gemma3TextConfig", {**GQA, "head_dim": 8}),
    "falcon": of("Falcon", CAUSAL, TEXT),
    "qwen2_moe": of("Qwen2Moe", CAUSAL, GQA, EXPERTS, shared_expert_intermediate_size=24),
    "olmoe": of("Olmoe", CAUSAL, MHA, num_experts=4, num_experts_per_tok=2),
    "ernie4_5_moe": of(
        "Ernie4_5_Moe",
        CAUSAL,
        {**GQA, "moe_k": 2, "moe_num_experts": 4, "moe_layer_start_index": 0},
        moe_intermediate_size=24,
    ),
    "marian": Animal(
        "MarianMTModel", "MarianConfig", {**PAIR, "pad_token_id": 1, "decoder_start_token_id": 1}
    ),
    "convnext": of("ConvNext", IMAGES, STAGES, num_stages=2),
    "dinov2": of("Dinov2", "Model", IMAGE),
    "segformer": of(
        "Segformer",
        "ForSemanticSegmentation",
        {**STEPS, **STAGES, "decoder_hidden_size": 16},
        num_attention_heads=[2, 4],
        mlp_ratios=[2, 2],
    ),
    "hubert": of("Hubert", "Model", SOUND),
    "siglip": of("Siglip", "Model", text_config=TEXT, vision_config=IMAGE),
    "blip": of(
        "Blip",
        GENERATION,
        text_config={**TEXT, "encoder_hidden_size": 32},
        vision_config=IMAGE,
        projection_dim=16,
    ),
    "mamba2": of("Mamba2", CAUSAL, STATES, num_heads=8, head_dim=8, n_groups=1),
    "rwkv": of("Rwkv", CAUSAL, vocab_size=99, hidden_size=32, num_hidden_layers=2),
    "falcon_h1": of(
        "FalconH1",
        CAUSAL,
        GQA,
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
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
