"""Weights rounded to the levels of few bits, in place: the extremes of each part, then one pass
over the elements.

A tensor is the concatenation of equal parts, each with levels of its own. With Q = 2^bits levels a
part g becomes, symmetric: clamp(r(g s), -Q/2, Q/2 - 1) / s with s = Q / (2 max|g|), asymmetric:
clamp(r((g - min g) / d), 0, Q - 1) d + min g with d = (max g - min g) / Q. r rounds to the nearest
integer, or stochastically: down after a number between 0 and 1 was added, so that the mean is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zero.errors import KernelError
from hf_zero.ops.dispatch import Kernel


def round_reference(
    values: Tensor,
    lowest: Tensor,
    highest: Tensor,
    bits: int,
    symmetric: bool,
    noise: Tensor | None,
    share: float,
) -> None:
    """Round as the kernel does, in torch: the parts of ``values`` are between ``lowest`` and
    ``highest``, [parts]; for symmetric levels ``highest`` has the largest magnitudes.
    """
    parts, levels = values.float().view(highest.numel(), -1), 2.0**bits
    low, high = lowest.float()[:, None], highest.float()[:, None]
    if symmetric:
        low, span = torch.zeros_like(high), high * 2
        least, most = -levels / 2, levels / 2 - 1
    else:
        span, least, most = high - low, 0.0, levels - 1
    step = span / levels
    step = torch.where(step > 0, step, torch.ones_like(step))  # all values are equal
    scaled = (parts - low) / step
    level = scaled.round() if noise is None else (scaled + noise.view_as(parts)).floor()
    rounded = level.clamp(least, most) * step + low
    values.copy_((rounded.lerp(parts, share) if share else rounded).view_as(values))


def _example(device: torch.device) -> tuple[object, ...]:
    values = torch.linspace(-1, 1, 40, device=device)
    return values, values[:1], values[-1:].clone(), 4, True, None, 0.0


ROUND = Kernel("level_rounding", "level_rounding:round_", round_reference, example=_example)


def round_to_levels(
    values: Tensor,
    bits: int,
    parts: int = 1,
    symmetric: bool = True,
    noise: Tensor | None = None,
    share: float = 0.0,
) -> Tensor:
    """Round ``values`` in place, and return them.

    Args:
        values: contiguous numbers in floating point; ``parts`` divides their number.
        noise: fp32 in [0, 1), of the size of ``values``, for stochastic rounding.
        share: weight of the original values in the result.

    Raises:
        KernelError: values that do not fulfil this.
    """
    numel = values.numel()
    cuts = parts > 0 and not numel % parts
    if not values.is_floating_point() or not values.is_contiguous() or not cuts:
        raise KernelError(
            f"round_to_levels: {numel} values of {values.dtype} with strides {values.stride()} in "
            f"{parts} parts; give contiguous ones in floating point, and a divisor of their number"
        )
    if noise is not None and (
        noise.dtype != torch.float32 or noise.numel() != numel or not noise.is_contiguous()
    ):
        raise KernelError(
            f"round_to_levels: noise has {noise.numel()} elements of {noise.dtype} with strides "
            f"{noise.stride()} for {numel} values; give a contiguous one in torch.float32 for each"
        )
    if not numel:
        return values
    rows = values.detach().view(parts, -1)
    if symmetric:
        lowest = highest = torch.linalg.vector_norm(rows, float("inf"), dim=1)
    else:
        lowest, highest = rows.aminmax(dim=1)
    ROUND(values, lowest, highest, bits, symmetric, noise, share)
    return values
