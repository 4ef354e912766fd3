"""bitsandbytes' dynamic maps: the values of 8-bit codes, from seven decades of equal steps.

Decade ``i`` of ten to the power of ``i - 6`` has 2^i values, 2^(i+1) without a sign, in the middle
of equal steps between a tenth and the whole of it; 0 and 1 complete the map. Values ascend with
their codes. With a sign there is a negative value for each positive one but 1 (Dettmers 2015,
arXiv:1511.04561; Dettmers et al. 2021, arXiv:2110.02861).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from hf_zero.device.pinned import upload

DECADES = 7
EDGES, LINES = DECADES + 1, DECADES + 2  # of the regions


@cache
def values(signed: bool) -> Tensor:
    """Return the value of each code in units of the block's scale, fp32 [256]."""
    midpoints = []
    for decade in range(DECADES):
        steps = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1, steps + 1, dtype=torch.float32, device="cpu")
        midpoints.append((edges[:-1] + edges[1:]) / 2 * 10 ** (decade + 1 - DECADES))
    positive = torch.cat(midpoints)
    both = [-positive, positive] if signed else [positive]
    return torch.cat([*both, positive.new_tensor([0.0, 1.0])]).sort().values


@cache
def magnitudes(signed: bool) -> Tensor:
    """Return the values that are not negative, ascending from 0: fp32 [129 or 256]."""
    table = values(signed)
    return table[table >= 0]


@cache
def regions(signed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the lines by which the rank of the nearest magnitude is found, in fp32: the edges
    between 0, the decades and 1, [8], and of each of these regions the slope, the shift and the
    largest rank, [9].
    """
    ranks = magnitudes(signed)
    slopes, shifts, tops, edges = [0.0], [0.0], [0.0], []
    for decade in range(DECADES):
        first, steps = int(tops[-1]) + 1, 2**decade if signed else 2 ** (decade + 1)
        whole = 10.0 ** (decade + 1 - DECADES)
        slopes.append(steps / (0.9 * whole))
        shifts.append(first - 0.1 * whole * slopes[-1])
        tops.append(first + steps - 1.0)
        edges.append(float(ranks[first - 1] + ranks[first]) / 2)
    last = len(ranks) - 1
    slopes, shifts, tops = [*slopes, 0.0], [*shifts, float(last)], [*tops, float(last)]
    edges.append(float(ranks[last - 1] + ranks[last]) / 2)
    tables = [ranks.new_tensor(table) for table in (edges, slopes, shifts, tops)]
    return tables[0], tables[1], tables[2], tables[3]


@cache
def on_device(signed: bool, device: torch.device) -> tuple[Tensor, ...]:
    """Return :func:`values` and the tables of :func:`regions` on ``device``, copied there once."""
    return tuple(upload(table, device) for table in (values(signed), *regions(signed)))


@cache
def device_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tables of the map with a sign and of that without on ``device``: the values of the
    codes, then what :func:`regions` returns, concatenated.
    """
    signed, unsigned = (torch.cat(on_device(sign, device)) for sign in (True, False))
    return signed, unsigned
