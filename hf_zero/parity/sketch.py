"""Sketches of parameters: their squared norm, and their products with seeded vectors of ±1.

The difference of two sketches is the sketch of the difference, and the mean square of its products
is an unbiased estimate of the squared distance (Alon, Matias and Szegedy 1996). Sketches of the
parts of a parameter add up, so that each rank computes that of its shard, and no whole model lies
beside another.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch

PRODUCTS = 8  # the distance is then known to about a quarter
CHUNK = 1 << 18  # elements at a time: the signs are computed, not kept
# odd 64-bit constants of splitmix64 (Steele et al. 2014), as signed numbers
STEP, FIRST, SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685

Sketch = list[float]


def sketch(values: torch.Tensor, name: str, start: int = 0) -> Sketch:
    """Return the squared norm of ``values``, and their products with :data:`PRODUCTS` vectors.

    Args:
        values: 1-D, elements ``start`` and following of the flattened parameter ``name``.
    """
    seed = zlib.crc32(name.encode())
    total = torch.zeros(1 + PRODUCTS, dtype=torch.float64, device=values.device)
    for first in range(0, values.numel(), CHUNK):
        part = values[first : first + CHUNK].double()
        at = torch.arange(start + first, start + first + part.numel(), device=values.device)
        total[0] += part.square().sum()
        total[1:] += _signs(at, seed) @ part
    return [float(number) for number in total]


def _signs(at: torch.Tensor, seed: int) -> torch.Tensor:
    """Return ±1 for each vector and index: float64[PRODUCTS, indices]."""
    bits = (at + seed + 1) * STEP  # wraps around
    bits = (bits ^ (bits >> 30)) * FIRST
    bits = (bits ^ (bits >> 27)) * SECOND
    bits = bits ^ (bits >> 31)
    shifts = torch.arange(8, 8 + PRODUCTS, device=at.device).unsqueeze(1)
    return (((bits.unsqueeze(0) >> shifts) & 1) * 2 - 1).double()


def added(sketches: Sequence[Sketch]) -> Sketch:
    """Return the sketch of a parameter from those of its parts."""
    return [
        math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)
        for numbers in zip(*sketches)
    ]


def norm(of: Sketch) -> float:
    return math.sqrt(of[0])


def distance(one: Sketch, other: Sketch) -> float:
    """Return the estimated norm of the difference; infinite or NaN if either is not finite."""
    squares = [(a - b) ** 2 for a, b in zip(one[1:], other[1:])]
    return math.sqrt(sum(squares) / len(squares))
