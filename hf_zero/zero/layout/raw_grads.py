"""Access to the gradients that autograd leaves on parameters, bypassing the guard of
:attr:`hf_zero.zero.layout.parameter.OwnedParameter.grad`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from operator import is_
from typing import Any

import torch

_grad: Any = torch.Tensor.grad


def raw_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that autograd left on ``parameter``."""
    with torch._C.DisableTorchFunctionSubclass():
        return _grad.__get__(parameter)


def raw_grads(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return :func:`raw_grad` of each. Fast: a step reads every parameter's."""
    with torch._C.DisableTorchFunctionSubclass():
        return [_grad.__get__(parameter) for parameter in parameters]


def any_raw_grad(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether autograd has left a gradient on one of ``parameters``."""
    with torch._C.DisableTorchFunctionSubclass():
        return not all(map(is_, map(_grad.__get__, parameters), repeat(None)))


def set_raw_grad(parameter: torch.Tensor, value: torch.Tensor | None) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        _grad.__set__(parameter, value)


def drop_raw_grads(parameters: Iterable[torch.Tensor]) -> None:
    """Clear the gradients of ``parameters``."""
    with torch._C.DisableTorchFunctionSubclass():
        for parameter in parameters:
            _grad.__set__(parameter, None)
