"""Weights rounded to levels: the kernel and its reference against the equations, element by
element, and how many operations a weight takes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_zero.ops import dispatch, level_rounding, philox
from hf_zero.ops.level_rounding import round_to_levels
from tests.helpers.buffers import Guarded
from tests.helpers.checked_triton import checked_triton

pytest.importorskip("triton")
DEVICE = torch.device("cpu") if dispatch.interpreted() else torch.device("cuda")


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


class Operations(TorchDispatchMode):
    """Counts the operations that compute: not views, not memory."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func._schema.name
        self.count += not (func.is_view or "empty" in name or name.endswith("detach"))
        return func(*args, **(kwargs or {}))


def test_a_weight_takes_two_launches_and_a_draw_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel, and the extremes before it."""
    monkeypatch.delenv("HF_ZERO_TRITON", raising=False)
    launched: list[str] = []
    for kernel in (level_rounding.ROUND, philox.FIRST_WORDS):
        monkeypatch.setattr(
            type(kernel), "launcher", lambda self: lambda *_: launched.append(self.name)
        )
    weight = torch.randn(64, 32, dtype=torch.bfloat16, device=DEVICE)
    for symmetric in (True, False):
        launched.clear()
        with Operations() as seen:
            round_to_levels(weight, 8, 4, symmetric)
        assert (seen.count, launched) == (1, ["level_rounding"])
    launched.clear()
    with Operations() as seen:
        philox.first_words(7, (1, 2, 3), 100, DEVICE)
    assert (seen.count, launched) == (0, ["philox_words"])


def test_a_grid_has_one_axis_for_any_number_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other two of CUDA's end at 65,535."""
    from hf_zero.ops.triton_kernels import level_rounding as kernels

    grids: list[tuple[int, ...]] = []

    class Launched:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **kwargs: grids.append(grid)

    monkeypatch.setattr(kernels, "round_kernel", Launched())
    values, ends = torch.zeros(1).expand(70_000, 3 * kernels.TILE), torch.zeros(1).expand(70_000)
    kernels.round_(values, ends, ends, 8, True, None, 0.0)
    assert grids == [(210_000,)]
