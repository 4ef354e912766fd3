"""Conditions under which a replaced forward takes over: equal dtypes, and submodules whose
parameters may be read without calling them.
"""

from __future__ import annotations

from typing import TypeGuard, TypeVar

import torch
from torch import nn

Part = TypeVar("Part", bound=nn.Module)

GELU = {
    "GELUActivation": "none",
    "NewGELUActivation": "tanh",
    "GELUTanh": "tanh",
    "PytorchGELUTanh": "tanh",
    "FastGELUActivation": "tanh",
    "AccurateGELUActivation": "tanh",
}
ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")
OURS = __name__.rpartition(".")[0]


def takes(x: torch.Tensor, *parameters: torch.Tensor) -> bool:
    """Return whether our operations compute the same as the replaced code: one dtype, and no
    autocast, which casts for each operation of torch.
    """
    return all(
        parameter.dtype == x.dtype for parameter in parameters
    ) and not torch.is_autocast_enabled(x.device.type)


def plain(module: nn.Module, kind: type[Part]) -> TypeGuard[Part]:
    """Return whether ``module`` is exactly a ``kind``, so that its parameters determine its
    forward.

    An adapter, a quantized layer or a module with hooks (also the engine's, if the module is
    gathered by itself) must be called.
    """
    if (
        type(module) is not kind
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ):
        return False
    return replaced(module) or "forward" not in module.__dict__


def replaced(module: nn.Module) -> bool:
    """Return whether the forward of ``module`` is one of ours."""
    function = getattr(module.__dict__.get("forward"), "__func__", None)
    return function is not None and function.__module__.startswith(OURS)


def gelu_of(activation: object) -> str | None:
    """Return the approximation of a GELU module, "none" or "tanh"; None for any other
    activation.
    """
    kind = type(activation)
    if kind.__module__ not in ACTIVATIONS:
        return None
    if kind is nn.GELU:
        return str(activation.approximate)  # type: ignore[attr-defined]
    return GELU.get(kind.__name__)


def is_silu(activation: object) -> bool:
    return type(activation).__module__ in ACTIVATIONS and type(activation).__name__ in (
        "SiLUActivation",
        "SiLU",
    )


def name_of(activation: object) -> str:
    return getattr(activation, "__name__", type(activation).__name__)
