"""Errors of our results beside those of torch, both against the same computation in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FACTOR = 1.1
FLOOR = 1e-6  # relative: sums in another order, in fp32


def gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], weights: Tensor | None = None
) -> list[Tensor]:
    """The result and the gradient of each input; ``weights`` is the gradient of the result
    (default: the same random one, exact in 16 bits).
    """
    leaves = [each.detach().requires_grad_() for each in inputs]
    result = function(*leaves)
    if weights is None:
        weights = (
            torch.randint(-64, 65, result.shape, generator=torch.Generator().manual_seed(7)).to(
                result.device
            )
            / 32
        )
    return [result.detach(), *torch.autograd.grad(result, leaves, weights.to(result.dtype))]


def assert_no_worse_than_torch(
    ours: Callable[..., Tensor], torchs: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> None:
    """``ours`` and its gradients are within a tenth as near to fp64 as ``torchs``, or as fp64
    rounded once; relative in norm.
    """
    exact = gradients(torchs, [each.double() for each in inputs])
    for number, (mine, other, true) in enumerate(
        zip(gradients(ours, inputs), gradients(torchs, inputs), exact)
    ):
        scale = true.norm().clamp_min(1e-30)
        error, beside, rounded = (
            (each.double() - true).norm().div(scale).item()
            for each in (mine, other, true.to(mine.dtype))
        )
        what = "the result" if number == 0 else f"the gradient of input {number - 1}"
        assert error <= FACTOR * max(beside, rounded) + FLOOR, (
            f"{what}: error {error:.3g}, torch's own {beside:.3g}, rounding {rounded:.3g}"
        )
        assert mine.dtype == other.dtype and mine.shape == other.shape, what
