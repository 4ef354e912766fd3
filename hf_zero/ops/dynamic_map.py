"""bitsandbytes' dynamic maps: the values of 8-bit codes, from seven decades of equal steps each.

Decade ``i`` of ten to the power of ``i - 6`` has 2^i values, 2^(i+1) without a sign, in the middle
of equal steps between a tenth and the whole of it; 0 and 1 complete the map. Values ascend with
their codes. With a sign there is a negative value for each positive one but 1 (Dettmers 2015,
arXiv:1511.04561; Dettmers et al. 2021, arXiv:2110.02861).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

DECADES = 7
FIRST_CELL, LAST_CELL = (127 - 23) << 7, 127 << 7  # upper 16 bits of 2^-23 and of 1


@cache
def values(signed: bool) -> Tensor:
    """Return the value of each code in units of the block's scale, fp32 [256]."""
    found = []
    for decade in range(DECADES):
        steps = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1, steps + 1, dtype=torch.float32)
        found.append((edges[:-1] + edges[1:]) / 2 * 10 ** (decade + 1 - DECADES))
    positive = torch.cat(found)
    both = [-positive, positive] if signed else [positive]
    return torch.cat([*both, torch.tensor([0.0, 1.0])]).sort().values


@cache
def magnitudes(signed: bool) -> Tensor:
    """Return the values that are not negative, ascending from 0: fp32 [129 or 256]."""
    table = values(signed)
    return table[table >= 0]


@cache
def edges(signed: bool) -> Tensor:
    """Return the middle between each magnitude and the next, fp32 [128 or 255]."""
    ranks = magnitudes(signed)
    return (ranks[:-1] + ranks[1:]) / 2


@cache
def cells(signed: bool) -> tuple[Tensor, Tensor]:
    """Return (edges fp32, ranks uint8) by cell, as kernels/cpu/kernels.h describes them."""
    bits = torch.arange(FIRST_CELL, LAST_CELL + 1, dtype=torch.int32) << 16
    starts, middles = bits.view(torch.float32), edges(signed)
    ranks = torch.bucketize(starts, middles)
    above = torch.cat([middles, torch.tensor([torch.inf])])[ranks]
    return above.contiguous(), ranks.to(torch.uint8).contiguous()
