"""Quantized model folders after quantization-aware training, as transformers loads them:
``quantization_config`` in config.json, weights of torchao.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import nn

from hf_zero.config.low_bits import AWARE
from hf_zero.errors import ConfigError
from hf_zero.techniques.blocks import linears_of_blocks
from hf_zero.techniques.quantized_linears import base_config

_WEIGHTS = (".safetensors", ".safetensors.index.json")


def quantize_folder(
    source: str | Path, folder: str | Path, name: str, group_size: int = 32
) -> object:
    """Quantize the model of ``source``, a folder of ``save_pretrained``, as configured by
    ``quantization_aware_training.config`` = ``name``, and write it to ``folder`` with the tokenizer
    and other files. Holds the whole model in memory. Returns it.

    Raises ConfigError for an unknown name, a folder whose config.json names no class of
    transformers, and without torchao.
    """
    import transformers

    if name not in AWARE:
        raise ConfigError(
            f"{name!r} is not a format to quantize to; write one of {', '.join(AWARE)}"
        )
    base = base_config(name, group_size)
    config = transformers.AutoConfig.from_pretrained(source)
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    if kind is None:
        raise ConfigError(
            f"config.json of {source} names no class of transformers (architectures: "
            f"{config.architectures}); quantize its model with torchao.quantization.quantize_"
        )
    with torch.device("meta"):
        skeleton = kind(config)
    chosen = set(linears_of_blocks(skeleton))
    unquantized = [
        path
        for path, module in skeleton.named_modules()
        if isinstance(module, nn.Linear) and path not in chosen
    ]
    model = kind.from_pretrained(
        source,
        quantization_config=transformers.TorchAoConfig(base, modules_to_not_convert=unquantized),
        dtype="auto",
    )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for path in Path(source).iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            shutil.copy2(path, folder)
    model.save_pretrained(folder)
    return model
