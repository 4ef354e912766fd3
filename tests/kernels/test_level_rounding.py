"""Weights rounded to levels: the kernel and its reference against the equations, element by
element, and how many operations a weight takes.
"""

from __future__ import annotations

import pytest
import torch

from hf_zero.ops.level_rounding import round_to_levels
from tests.helpers.buffers import Guarded
from tests.helpers.checked_triton import checked_triton

pytest.importorskip("triton")


def equations(
    x: torch.Tensor, bits: int, parts: int, symmetric: bool, noise: torch.Tensor | None
) -> torch.Tensor:
    """The module's equations in fp64."""
    g, levels = x.double().view(parts, -1), 2.0**bits
    if symmetric:
        scale, low, ends = 2 * g.abs().amax(1) / levels, 0.0, (-levels / 2, levels / 2 - 1)
    else:
        low = g.amin(1)[:, None]
        scale, ends = (g.amax(1) - g.amin(1)) / levels, (0.0, levels - 1)
    scale = torch.where(scale > 0, scale, 1.0)[:, None]
    r = (g - low) / scale
    r = r.round() if noise is None else (r + noise.double().view_as(g)).floor()
    return (r.clamp(*ends) * scale + low).view_as(x)


def agree(
    bits: int, numel: int, parts: int, stochastic: bool, symmetric: bool, dtype: torch.dtype
) -> None:
    guarded = Guarded()
    x = torch.randn(numel).to(dtype)
    noise = guarded(torch.rand(numel)) if stochastic else None
    wanted = equations(x, bits, parts, symmetric, noise)
    step = (x.double().amax() - x.double().amin()).abs().clamp(min=1e-3) * 2.0 ** (1 - bits)
    for share in (0.0, 0.3):
        mixed = (wanted + share * (x.double() - wanted)).to(dtype).double()
        by_kernel, by_reference = guarded(x.clone()), x.clone()
        round_to_levels(by_reference, bits, parts, symmetric, noise, share)
        with checked_triton() as settings:
            round_to_levels(by_kernel, bits, parts, symmetric, noise, share)
        assert settings.launches
        for got in (by_kernel, by_reference):
            # a value between two levels may be rounded to the other one by fp32
            far = (got.double() - mixed).abs()
            exact = far <= 1e-3 * mixed.abs() + 1e-5
            assert exact.double().mean() > 0.99 and far.max() <= 1.01 * step + 1e-2 * x.abs().max()
        if not share:
            assert torch.equal(by_kernel, by_reference)
    guarded.check()


WIDE, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16
# bits, elements, parts, stochastic, symmetric
CELLS: list[tuple[int, int, int, bool, bool, torch.dtype]] = [
    (2, 1, 1, False, True, WIDE),
    (2, 300, 3, False, False, BRAIN),
    (2, 6150, 2, True, True, HALF),
    (8, 300, 3, True, False, WIDE),
    (8, 2048, 1, False, True, BRAIN),
    (8, 1, 1, True, False, HALF),
    (16, 6150, 2, False, False, WIDE),
    (16, 2048, 1, True, True, BRAIN),
]


def test_levels_are_those_of_the_equations() -> None:
    for cell in CELLS:
        agree(*cell)
    same, zeros = torch.full((40,), 0.25), torch.zeros(40)
    assert torch.equal(round_to_levels(same.clone(), 4, symmetric=False), same)
    assert torch.equal(round_to_levels(zeros.clone(), 4), zeros)
    assert round_to_levels(torch.empty(0), 4).numel() == 0
    assert round_to_levels(torch.tensor([1.0, float("nan"), -1.0]), 4)[1].isnan()
