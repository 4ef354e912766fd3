"""Slow references of the kernels over flat buffers and lists of tensors, in plain torch, each line
of a formula a line of code.

Those of flat buffers read the kernels' tables on the host, and so wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_zero.ops.flat_tiles import COEFFICIENTS
from hf_zero.ops.updates import divided, signs


def sums_of_squares(tensors: Sequence[list[Tensor]]) -> Tensor:
    """Return the sums of squares of each tensor: [parts, k] in 64 bits, of k lists of tensors."""
    columns = [torch.stack(list(torch._foreach_norm(t))).double().square() for t in tensors]
    return torch.stack(columns, dim=1)


def advance_(steps: Tensor, settings: Tensor, found_inf: Tensor | None) -> Tensor:
    lr, decay, beta1, beta2, eps, log_beta1, log_beta2, sign, decoupled = settings.unbind(1)
    count = steps + 1
    step_size = lr / (1 - torch.exp(count.double() * log_beta1))
    root_scale = (1 - torch.exp(count.double() * log_beta2)).rsqrt()
    columns = [
        sign,
        1 - lr * decay * decoupled,
        decay * (1 - decoupled),
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        step_size,
        root_scale,
        eps,
        lr,
    ]
    out = torch.zeros(steps.numel(), COEFFICIENTS, dtype=torch.float32, device=steps.device)
    out[:, : len(columns)] = torch.stack(columns, dim=1).float()
    steps.copy_(count if found_inf is None else torch.where(found_inf == 0, count, steps))
    return out


def adam_(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    out: Tensor | None,
    table: Tensor,
    coefficients: Tensor,
    divisor: Tensor | None,
    found_inf: Tensor | None,
    tile: int,
) -> None:
    for at, numbers in _tiles(table, coefficients, found_inf):
        _, keep, l2, beta1, rest1, beta2, rest2, step_size, root_scale, eps, _ = numbers
        w, m, v = master[at[0]], exp_avg[at[2]], exp_avg_sq[at[2]]
        g = grad[at[1]].float() * _factor(numbers[0], divisor)
        g = g + w * l2
        m.copy_(m * beta1 + g * rest1)
        v.copy_(v * beta2 + (g * rest2) * g)
        w.copy_(w * keep - (m * step_size) / (v.sqrt() * root_scale + eps))
        if out is not None:
            out[at[3]] = w.to(out.dtype)


def lion_(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    out: Tensor | None,
    table: Tensor,
    coefficients: Tensor,
    divisor: Tensor | None,
    found_inf: Tensor | None,
    tile: int,
) -> None:
    for at, numbers in _tiles(table, coefficients, found_inf):
        _, keep, l2, beta1, rest1, beta2, rest2, *_, lr = numbers
        w, m = master[at[0]], exp_avg[at[2]]
        g = grad[at[1]].float() * _factor(numbers[0], divisor) + w * l2
        way = m * beta1 + g * rest1
        w.copy_(w * keep - signs(way) * lr)
        m.copy_(m * beta2 + g * rest2)
        if out is not None:
            out[at[3]] = w.to(out.dtype)


def _tiles(
    table: Tensor, coefficients: Tensor, found_inf: Tensor | None
) -> Iterator[tuple[list[slice], list[float]]]:
    """Yield for each tile its slices of the master, the gradient, the moments and the copy, and its
    eleven coefficients; nothing if the step is skipped.
    """
    if found_inf is not None and bool(found_inf != 0):
        return
    rows = coefficients.tolist()
    for *places, length, row, _, _ in table.tolist():
        yield [slice(start, start + length) for start in places], rows[row][:11]


def _factor(sign: float, divisor: Tensor | None) -> Tensor | float:
    return sign if divisor is None else sign / divisor


def lamb_measure(
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


def lamb_apply(
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
