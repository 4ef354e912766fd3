"""A decoder with a given number of parameters, for simulations of a size without a model."""

from __future__ import annotations

import math

from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.integrations.transformers.meta_model import build_on_meta

WIDTH_PER_LAYER = 150  # between the 128 of a 7B Llama and the 200 of the ZeRO paper's largest model
HEAD = 128  # width of an attention head, of which that of the model is a multiple
WORDS = 32_000
SMALLEST, LARGE, LARGEST = 1e6, 5e9, 1e15


def sized_model(parameters: float) -> nn.Module:
    """Return a Llama without memory, of ``parameters`` parameters up to a five-hundredth.

    Its depth and width grow together; the width of its MLPs gives it the size. Heads and widths
    divide among 8 tensor-parallel ranks from :data:`LARGE` on, among 2 below. Raises ConfigError
    below :data:`SMALLEST` and above :data:`LARGEST`.
    """
    if not SMALLEST <= parameters <= LARGEST:
        raise ConfigError(
            f"params = {parameters:g} is no size of a model; write a number from {SMALLEST:g} to "
            f"{LARGEST:g}"
        )
    layers = max(1, round((parameters / 12 / WIDTH_PER_LAYER**2) ** (1 / 3)))
    heads, step = (8, 16) if parameters >= LARGE else (2, 2)
    grain = heads * HEAD
    width = grain * max(1, round(math.sqrt(parameters / 12 / layers) / grain))
    words = min(WORDS, 64 * max(1, int(parameters / 20 / width / 64)))
    in_mlps = parameters - (2 * words + 1) * width - layers * (4 * width + 2) * width
    mlp = step * max(1, round(in_mlps / (3 * width * layers * step)))
    sizes = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": width // HEAD,
        "vocab_size": words,
        "max_position_embeddings": 1 << 20,
    }
    return build_on_meta(sizes)
