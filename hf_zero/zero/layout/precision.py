"""The compute dtype of each parameter."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable

import torch
from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.zero.layout.declared import declared
from hf_zero.zero.layout.parameter import given_class

# smaller floats are quantized weights, handled as raw bytes
CASTABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def holds_raw_bytes(parameter: torch.Tensor) -> bool:
    """Return whether only the module of ``parameter`` can read its bytes: they are never cast."""
    return parameter.dtype not in CASTABLE or (
        given_class(parameter) is not nn.Parameter and not parameter.requires_grad
    )


def kept_in_fp32(
    model: nn.Module,
    precision: str,
    configured: Iterable[str],
    others: Iterable[tuple[str, nn.Parameter]] = (),
) -> frozenset[str]:
    """Return the names of the parameters that compute in fp32 under ``precision``: all names of
    those in one of whose names those ``configured``, or declared by the model or one of its
    submodules, are a part. ``others``: parameters outside the model.
    """
    parts = {"": set(configured)}
    attributes = ["_keep_in_fp32_modules_strict"]
    attributes += ["_keep_in_fp32_modules"] if precision == "fp16" else []
    for attribute in attributes:
        for prefix, names in declared(model, attribute).items():
            parts.setdefault(prefix, set()).update(names)
    patterns = [
        re.compile(
            (re.escape(prefix) + r"\.(.*\.)?" if prefix else r"(.*\.)?")
            + f"({'|'.join(map(re.escape, sorted(names)))})"
            + r"(\..*)?"
        )
        for prefix, names in parts.items()
        if names
    ]
    if not patterns:
        return frozenset()
    named = [*model.named_parameters(remove_duplicate=False), *others]
    kept = {id(p) for name, p in named if any(pattern.fullmatch(name) for pattern in patterns)}
    return frozenset(name for name, parameter in named if id(parameter) in kept)


def compute_dtype(
    name: str, parameter: torch.Tensor, precision: str, in_fp32: Container[str]
) -> torch.dtype:
    """Return the dtype that ``parameter`` computes in: the configured one, fp32 for names in
    ``in_fp32``, the own one of raw (quantized) and of frozen fp64 parameters.

    Raises ConfigError for a 16-bit trainable parameter in fp32 training: its updates would vanish
    without a master copy.
    """
    if holds_raw_bytes(parameter):
        return parameter.dtype
    if precision == "fp32":
        if parameter.dtype in (torch.bfloat16, torch.float16) and parameter.requires_grad:
            kind = "bf16" if parameter.dtype == torch.bfloat16 else "fp16"
            raise ConfigError(
                f"parameter {name} is {parameter.dtype} but neither bf16 nor fp16 is enabled "
                "in the config; write "
                f'"{kind}": {{"enabled": true}}, or load the model with dtype=torch.float32'
            )
        return parameter.dtype
    if parameter.dtype == torch.float64 and not parameter.requires_grad:
        return parameter.dtype
    return torch.float32 if name in in_fp32 else COMPUTE[precision]
