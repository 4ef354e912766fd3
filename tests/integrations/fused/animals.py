"""Tiny models of every family that fused kernels are for, their inputs, and what a forward and
backward of one gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

BLOCKS = ("norms", "activations", "rotary", "qkv", "residual")
VOCABULARY = 67


@dataclass(frozen=True)
class Animal:
    """``replaced``: the kernels that a model must get, class by class."""

    model: str
    config: str
    options: dict[str, Any]
    replaced: dict[str, tuple[str, ...]]


_DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
_ENCODER = _DECODER | {"intermediate_size": 48}
GROUPED = _DECODER | {"num_key_value_heads": 2}


def _llama(name: str, **more: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return {
        f"{name}RMSNorm": ("norms",),
        f"{name}Attention": ("qkv", "rotary"),
        f"{name}MLP": ("activations", "qkv"),
        **more,
    }


def _bert(name: str) -> dict[str, tuple[str, ...]]:
    return {
        "LayerNorm": ("norms",),
        f"{name}SelfAttention": ("qkv",),
        f"{name}SelfOutput": ("residual",),
        f"{name}Output": ("residual",),
        f"{name}Intermediate": ("activations",),
        f"{name}PredictionHeadTransform": ("activations",),
    }


def _without(table: dict[str, tuple[str, ...]], *names: str) -> dict[str, tuple[str, ...]]:
    return {name: kernels for name, kernels in table.items() if name not in names}


def causal(
    name: str, options: dict[str, Any], replaced: dict[str, tuple[str, ...]] | None = None
) -> Animal:
    return Animal(f"{name}ForCausalLM", f"{name}Config", options, replaced or _llama(name))


def _masked(name: str, options: dict[str, Any], replaced: dict[str, tuple[str, ...]]) -> Animal:
    return Animal(f"{name}ForMaskedLM", f"{name}Config", options, replaced)


_HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_RELATIVE = {
    "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
}  # fmt: skip
_DISTIL = {
    "vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
    "num_heads": 4, "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0,
}  # fmt: skip
_VIT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 16, "patch_size": 4, "num_labels": 5,
}  # fmt: skip
_WINDOW = GROUPED | {"head_dim": 8, "sliding_window": 8}
ANIMALS = {
    "llama": causal("Llama", GROUPED),
    "llama-biased": causal("Llama", GROUPED | {"attention_bias": True, "mlp_bias": True}),
    "gemma": causal("Gemma", GROUPED | {"head_dim": 8}),
    "gemma2": causal("Gemma2", _WINDOW),
    "gemma3": Animal("Gemma3ForCausalLM", "Gemma3TextConfig", _WINDOW, _llama("Gemma3")),
    "phi": causal(
        "Phi",
        _DECODER | {"rope_parameters": _HALF},
        {"LayerNorm": ("norms",), "PhiAttention": ("qkv", "rotary"), "PhiMLP": ("activations",)},
    ),
    "phi3": causal(
        "Phi3",
        GROUPED | {"pad_token_id": 0},
        _llama("Phi3") | {"Phi3Attention": ("rotary",), "Phi3MLP": ("activations",)},
    ),
    "mixtral": causal(
        "Mixtral",
        GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
        _without(_llama("Mixtral"), "MixtralMLP"),
    ),
    "bert": _masked("Bert", _ENCODER, _bert("Bert")),
    "roberta": _masked(
        "Roberta",
        _ENCODER | {"pad_token_id": 1},
        _without(_bert("Roberta"), "RobertaPredictionHeadTransform")
        | {"RobertaLMHead": ("activations",)},
    ),
    "deberta-v2": _masked(
        "DebertaV2",
        _ENCODER | _RELATIVE,
        _without(_bert("DebertaV2"), "DebertaV2SelfAttention", "DebertaV2PredictionHeadTransform")
        | {
            "DisentangledSelfAttention": ("qkv",),
            "LegacyDebertaV2PredictionHeadTransform": ("activations",),
        },
    ),
    "distilbert": _masked(
        "DistilBert",
        _DISTIL,
        {
            "LayerNorm": ("norms",),
            "DistilBertSelfAttention": ("qkv",),
            "FFN": ("activations",),
        },
    ),
    "gpt2": Animal(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        {"LayerNorm": ("norms",), "GPT2MLP": ("activations",)},
    ),
    "t5": Animal(
        "T5ForConditionalGeneration",
        "T5Config",
        _T5,
        {
            "T5LayerNorm": ("norms",),
            "T5LayerFF": ("residual",),
            "T5Attention": ("qkv",),
            "T5DenseGatedActDense": ("activations", "qkv"),
        },
    ),
    "vit": Animal(
        "ViTForImageClassification",
        "ViTConfig",
        _VIT,
        {
            "LayerNorm": ("norms",),
            "ViTAttention": ("qkv",),
            "ViTMLP": ("activations",),
        },
    ),
}
# Names of classes in earlier releases of Transformers, the floor's among them.
FORMER_NAMES = {"ViTIntermediate": "ViTMLP", "ViTSelfAttention": "ViTAttention"}
# of each kind of blocks one: the fast suite
KINDS = ("llama", "gemma2", "phi3", "mixtral", "roberta", "gpt2", "t5", "vit")


def build(
    name: str | Animal,
    *,
    dropout: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **options: Any,
) -> Any:
    """Return the model in training mode, its weights from ``seed`` and large enough that no
    gradient is noise.
    """
    import transformers

    animal = ANIMALS[name] if isinstance(name, str) else name
    config = getattr(transformers, animal.config)(**(animal.options | options))
    for key, value in list(vars(config).items()):
        if isinstance(value, float) and ("drop" in key or key.endswith("pdrop")):
            setattr(config, key, 0.1 if dropout else 0.0)
        elif key == "initializer_range" and key not in options:
            setattr(config, key, 0.2)
    torch.manual_seed(seed)
    model = getattr(transformers, animal.model)(config)
    with torch.no_grad():
        # biases of zero and norms of one would hide what a kernel forgets
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.to(dtype).train()


def inputs(
    name: str, *, device: str = "cpu", rows: int = 3, tokens: int = 13, seed: int = 1
) -> dict[str, torch.Tensor]:
    """Padded on the right where the model takes a mask; some labels are -100."""
    draw = torch.Generator().manual_seed(seed)
    if name == "vit":
        made = {
            "pixel_values": torch.randn(rows, 3, 16, 16, generator=draw),
            "labels": torch.randint(5, (rows,), generator=draw),
        }
        return {key: value.to(device) for key, value in made.items()}
    ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=draw)
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    labels = ids.masked_fill(torch.rand(ids.shape, generator=draw) < 0.5, -100).masked_fill(
        mask == 0, -100
    )
    made = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {key: value.to(device) for key, value in made.items()}


def step(
    model: nn.Module, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return loss and every gradient, in fp32, of one forward and backward, with dropout from a
    seed.
    """
    torch.manual_seed(2)
    floats = next(model.parameters()).dtype
    given = {key: v.to(floats) if v.is_floating_point() else v for key, v in batch.items()}
    loss = model(**given).loss
    loss.backward()
    grads = {
        name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return loss.detach().float(), grads


def error(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the norm of each difference over the norm of what is right.

    The gradient of a key's bias is zero without rotation, since softmax does not see it, and comes
    out as rounding: that counts against the gradient of the weight beside it.
    """
    assert found.keys() == right.keys()
    errors = {}
    for name, grad in right.items():
        size, beside = float(grad.norm()), right.get(name.replace("bias", "weight"))
        if beside is not None and size < 1e-4 * float(beside.norm()):
            size = float(beside.norm())
        errors[name] = float((found[name] - grad).norm()) / max(size, 1e-12)
    return errors


def on_every(test: Callable[..., Any]) -> Callable[..., Any]:
    import pytest

    return pytest.mark.parametrize("name", list(ANIMALS))(test)
