"""What a replaced forward asks before it takes over: dtypes that agree, and submodules whose
parameters may be read without a call.
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
    """Whether our operations mean the same as the code they stand for: one dtype, and no
    autocast, which casts for each operation of torch.
    """
    return all(
        parameter.dtype == x.dtype for parameter in parameters
    ) and not torch.is_autocast_enabled(x.device.type)


def plain(module: nn.Module, kind: type[Part]) -> TypeGuard[Part]:
    """Whether ``module`` is a ``kind`` and nothing more, so that its parameters say what a call of
    it does.

    An adapter, a quantised layer or a hook (also the engine's, where the module is gathered by
    itself) must be called.
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
    """Whether the forward of ``module`` is one of ours."""
    function = getattr(module.__dict__.get("forward"), "__func__", None)
    return function is not None and function.__module__.startswith(OURS)


def gelu_of(activation: object) -> str | None:
    """ "none" or "tanh": the approximation of a GELU module; None for any other activation."""
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
