"""The slow reference of the sums of squares: range by range in fp64.

It reads the tables on the host, and so waits for the device.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def squares(base: Tensor, runs: Tensor, bounds: Tensor) -> Tensor:
    """Return the sums of squares, [ranges] fp64, of ranges of ``base``, whose runs are
    ``runs[bounds[i] : bounds[i + 1]]``.
    """
    table, at = runs.tolist(), bounds.tolist()
    sums = torch.zeros(len(at) - 1, dtype=torch.float64, device=base.device)
    for index, (first, last) in enumerate(itertools.pairwise(at)):
        for start, length, _, _ in table[first:last]:
            sums[index] += base[start : start + length].double().square().sum()
    return sums
