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
HEADS = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
PATCHES = {"image_size": 16, "patch_size": 8}
IMAGE = {**{name: value for name, value in TEXT.items() if name != "vocab_size"}, **PATCHES}
CONVOLUTIONS = {"conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3]}
POSITIONS = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
SOUND = {**TEXT, "vocab_size": 32, **CONVOLUTIONS, **POSITIONS}
LOW_RANK = {"q_lora_rank": 16, "kv_lora_rank": 16}
LATENT = {**LOW_RANK, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}


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
}

LOGITS = ("bert", "gpt2", "llama", "qwen2", "mixtral")
"""Those whose outputs are compared as well."""


def animal(name: str) -> Animal:
    return ZOO[name]


def save(names: Iterable[str], folder: Path) -> None:
    """Save each model in three files or more, under its name."""
    for name in names:
        model = animal(name).build()
        size = sum(parameter.nbytes for parameter in model.parameters())
        model.save_pretrained(folder / name, max_shard_size=size // 3)


def inputs() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(2 * 8).view(2, 8) * 7 % 90 + 5}
