"""The compute dtype of each parameter, and errors of operations over several dtypes."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn

from hf_zero.errors import ConfigError, PartitionError
from hf_zero.logging import listed
from hf_zero.zero.layout.parameter import given_class
from hf_zero.zero.layout.tree import tensors_in
from hf_zero.zero.layout.walk import declared, named_modules_of

# smaller floats are quantized weights, handled as raw bytes
CASTABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# in torch's messages about operands of different dtypes
TORCH_NAMES = {torch.bfloat16: "BFloat16", torch.float16: "Half"}


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


def refuse_mixed_dtypes(
    error: RuntimeError,
    model: nn.Module,
    precision: str,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
) -> None:
    """Raise PartitionError if torch's ``error`` in a forward of ``model`` with ``inputs`` is about
    operands of different dtypes, and inputs, buffers or parameters have another dtype than that of
    ``precision``.
    """
    dtype = COMPUTE[precision]
    mixed = TORCH_NAMES.get(dtype, "") in str(error) or "mixed dtype" in str(error)
    if dtype == torch.float32 or not mixed:
        return
    args, kwargs = inputs
    named = {f"argument {index}": value for index, value in enumerate(args)} | kwargs
    tensors = ((name, tensor) for name, value in named.items() for tensor in tensors_in(value))
    if others := _of_another_dtype(tensors, dtype):
        raise PartitionError(
            f"the model computes in {precision} and its inputs are not cast: {others}; cast them "
            f"by .to({dtype}), or turn torch_autocast on in place of {precision} ({error})"
        ) from error
    modules = named_modules_of(model)
    own = (
        (f"{prefix}.{name}".lstrip("."), tensor)
        for prefix, module in modules
        for name, tensor in chain(module._buffers.items(), module._parameters.items())
    )
    if others := _of_another_dtype(own, dtype):
        raise PartitionError(
            f"{_innermost(error, modules)} has operands of different dtypes: the model computes in "
            f"{precision}, and beside it has {others}. Buffers are not cast: set "
            f'"data_types": {{"buffer_dtype": "{precision}"}}; or cast what such a buffer, or a '
            f"module kept in fp32, takes and returns, in the forward ({error})"
        ) from error


def _of_another_dtype(
    tensors: Iterable[tuple[str, torch.Tensor | None]], dtype: torch.dtype
) -> str:
    """Return the names of floating-point ``tensors`` with another dtype, in words."""
    others = {
        name: str(tensor.dtype).removeprefix("torch.")
        for name, tensor in tensors
        if tensor is not None and tensor.dtype in CASTABLE and tensor.dtype != dtype
    }
    return listed((f"{name} ({other})" for name, other in others.items()), 4)


def _innermost(error: BaseException, modules: Iterable[tuple[str, nn.Module]]) -> str:
    """Return the module of the model in whose forward ``error`` was raised, in words."""
    names = {id(module): name for name, module in modules}
    text, traceback = "the model", error.__traceback__
    while traceback is not None:
        module = traceback.tb_frame.f_locals.get("self")
        if names.get(id(module)):
            text = f"{names[id(module)]} ({type(module).__name__})"
        traceback = traceback.tb_next
    return text
