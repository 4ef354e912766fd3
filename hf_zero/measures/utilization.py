"""Model FLOPs utilization: operations of the model by a formula, peaks of devices by their names.

A token costs 6 operations for each weight of a matrix that trains, forward and backward, 4 for one
that is frozen, and 12 * layers * width * length for attention (PaLM, arXiv:2204.02311, appendix B).
Recomputed operations do not count.
"""

from __future__ import annotations

import re

import torch
from torch import nn

from hf_zero.device import kinds
from hf_zero.zero.layout.walk import config_of, text_config_of

# dense TFLOP/s in 16 bits, by the vendors' data sheets; the first name whose words a device has
PEAKS = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H200", 989.0),
    ("H800", 989.0),
    ("H20", 148.0),
    ("GH200", 989.0),
    ("B200", 2250.0),
    ("GB200", 2500.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 149.7),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("V100", 125.0),
    ("T4", 65.0),
    ("MI300X", 1307.0),
    ("MI250", 362.1),
)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return operations per second of ``device`` in 16 bits; None: unknown, or fp32."""
    if kinds.is_synchronous(device) or precision == "fp32":
        return None
    name = str(getattr(kinds.properties(device), "name", ""))
    # whole words: an RTX A4000 is no A40
    return next((1e12 * peak for words, peak in PEAKS if re.search(rf"\b{words}\b", name)), None)


def flops_per_token(model: nn.Module, length: float, tensor: int, stages: int) -> float | None:
    """Return the operations of a token of a sequence of ``length`` tokens on this rank: one of
    ``tensor`` that share each layer, and of ``stages`` of a pipeline. None for a mixture of
    experts, whose tokens do not use all weights.
    """
    config, text = config_of(model), text_config_of(model)
    experts = ("num_local_experts", "num_experts", "n_routed_experts")
    if any(getattr(config, name, 0) for name in experts):
        return None
    tables: dict[int, nn.Parameter] = {}
    matrices: dict[int, nn.Parameter] = {}
    for module in model.modules():
        numbers = tables if isinstance(module, nn.Embedding) else matrices
        numbers.update({id(p): p for p in module.parameters(recurse=False) if p.dim() > 1})
    dense = sum((6 if p.requires_grad else 4) * p.numel() for p in matrices.values())
    layers = getattr(text, "num_hidden_layers", 0) or 0
    width = getattr(text, "hidden_size", 0) or 0
    return dense + 12 * layers * width * length / (tensor * stages)
