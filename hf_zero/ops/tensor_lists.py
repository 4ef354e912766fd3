"""Shared parts of steps over lists of tensors, in torch's operations over lists."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def divided(grads: Sequence[Tensor], like: Sequence[Tensor], divisor: float) -> list[Tensor]:
    """Return ``grads``, of any float dtypes, over ``divisor``, in the dtypes of ``like``."""
    cast = [grad.to(each.dtype) for grad, each in zip(grads, like)]
    return cast if divisor == 1.0 else list(torch._foreach_div(cast, divisor))


def squares(tensors: Sequence[list[Tensor]]) -> Tensor:
    """Return the sums of squares of each tensor: [parts, k] in 64 bits, of k lists of tensors."""
    columns = [torch.stack(list(torch._foreach_norm(each))).double().square() for each in tensors]
    return torch.stack(columns, dim=1)
