"""Tiny models of several types with random weights, saved as the hub keeps them: in several files,
in the hub's layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4
}  # fmt: skip
IMAGE = {**SIZES, "image_size": 16, "patch_size": 8}
TEXT = {**SIZES, "vocab_size": 99}
GQA = {**TEXT, "num_key_value_heads": 2}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
GATED = {
    "num_key_value_heads": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "n_routed_experts": 4, "moe_intermediate_size": 24,
}  # fmt: skip
SOUND = {
    "vocab_size": 32, "conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3],
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
T5 = {
    "vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4
}  # fmt: skip
CLIP = {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 16}


@dataclass(frozen=True)
class Animal:
    """A family, its model's class without that name, and options of its configuration."""

    kind: str
    head: str
    options: dict[str, Any]

    @property
    def cls(self) -> Any:
        return getattr(transformers, f"{self.kind}{self.head}")

    @property
    def config(self) -> str:
        return f"{self.kind}Config"

    def build(self) -> Any:
        """The model with random weights, the same at every call."""
        model = self.cls(getattr(transformers, self.config)(**self.options))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                if tensor.is_floating_point():
                    tensor.copy_(torch.rand(tensor.shape, generator=generator) * 0.1 + 0.01)
        return model


CAUSAL = "ForCausalLM"
ZOO: dict[str, Animal] = {
    "bert": Animal("Bert", "ForMaskedLM", TEXT),
    "roberta": Animal("Roberta", "ForSequenceClassification", TEXT),
    "llama": Animal("Llama", CAUSAL, GQA),
    "qwen2": Animal("Qwen2", CAUSAL, {**GQA, "tie_word_embeddings": True}),
    # experts are merged on loading
    "mixtral": Animal("Mixtral", CAUSAL, {**GQA, "num_local_experts": 4}),
    "deepseek_v3": Animal("DeepseekV3", CAUSAL, TEXT | LATENT | GATED),
    "t5": Animal("T5", "ForConditionalGeneration", T5),
    "resnet": Animal(
        "ResNet",
        "ForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1]},
    ),
    "wav2vec2": Animal("Wav2Vec2", "ForCTC", TEXT | SOUND),
    # several kinds in one
    "clip": Animal("CLIP", "Model", CLIP),
}

WHISPER = {
    "vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 8,
    "max_source_positions": 20, "max_target_positions": 20, "pad_token_id": 1,
    "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 4,
}  # fmt: skip
JAMBA = {
    **GQA, "attn_layer_period": 2, "expert_layer_period": 2, "attn_layer_offset": 1,
    "expert_layer_offset": 1, "num_experts": 4, "use_mamba_kernels": False, "mamba_d_state": 8,
    "mamba_dt_rank": 4,
}  # fmt: skip
# those of ranks/test_matrix.py alone
MORE: dict[str, Animal] = {
    "whisper": Animal("Whisper", "ForConditionalGeneration", WHISPER),
    "jamba": Animal("Jamba", CAUSAL, JAMBA),
}

LOGITS = ("bert", "llama", "mixtral")
"""Those whose outputs are compared as well."""


def animal(name: str) -> Animal:
    return (ZOO | MORE)[name]


def save(names: Iterable[str], folder: Path) -> None:
    """Save each model in three files or more, under its name."""
    for name in names:
        model = animal(name).build()
        size = sum(parameter.nbytes for parameter in model.parameters())
        model.save_pretrained(folder / name, max_shard_size=size // 3)


def inputs() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(2 * 8).view(2, 8) * 7 % 90 + 5}
