"""The passes of LAMB in torch's operations over lists of tensors; see ``lamb.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zero.ops.tensor_lists import divided
from hf_zero.ops.tensor_lists import squares as sums_of_squares


def measure(
    weights: list[Tensor],
    grads: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    eps_inside: bool,
    divisor: float,
) -> Tensor:
    cast = divided(grads, weights, divisor)
    torch._foreach_mul_(means, beta1)
    torch._foreach_add_(means, cast, alpha=1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, cast, cast, value=1 - beta2)
    return sums_of_squares([weights, _update(weights, means, squares, eps, decay, eps_inside)])


def apply(
    weights: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    step_sizes: Tensor,
    eps: float,
    decay: float,
    eps_inside: bool,
) -> None:
    update = _update(weights, means, squares, eps, decay, eps_inside)
    torch._foreach_mul_(update, list(step_sizes.unbind()))
    torch._foreach_sub_(weights, update)


def _update(
    weights: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    eps: float,
    decay: float,
    eps_inside: bool,
) -> list[Tensor]:
    if eps_inside:
        below = list(torch._foreach_add(squares, eps))
        torch._foreach_sqrt_(below)
    else:
        below = list(torch._foreach_sqrt(squares))
        torch._foreach_add_(below, eps)
    update = list(torch._foreach_div(means, below))
    if decay:
        torch._foreach_add_(update, weights, alpha=decay)
    return update
