"""Operations that the updates of optimizers share with the references of their kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def signs(way: Tensor) -> Tensor:
    """Return the signs of ``way``. NaN, for which torch returns 0, stays NaN: the weight must not
    stay as it is while the momentum is NaN for ever.
    """
    return torch.where(way.isnan(), way, way.sign())


def divided(grads: Sequence[Tensor], like: Sequence[Tensor], divisor: float) -> list[Tensor]:
    """Return ``grads``, of any float dtypes, over ``divisor``, in the dtypes of ``like``."""
    cast = [grad.to(other.dtype) for grad, other in zip(grads, like)]
    return cast if divisor == 1.0 else list(torch._foreach_div(cast, divisor))
