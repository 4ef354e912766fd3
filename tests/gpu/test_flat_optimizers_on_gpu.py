"""The flat optimizers on a GPU at real sizes: beside torch's fused step and fp64."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_zero.ops import dispatch
from hf_zero.ops.flat_optimizers import (
    FlatRun,
    RowSettings,
    Tiles,
    adam_,
    advance_,
    lion_,
    settings_table,
)
from hf_zero.ops.flat_tiles import squared_norms
from hf_zero.ops.lamb import LambSettings, apply_, measure_
from hf_zero.optim.lion import Lion

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 3


@pytest.fixture(autouse=True)
def nothing_breaks():
    yield
    assert not dispatch.broken()


def lengths(numel: int, tensors: int) -> list[int]:
    """``tensors`` odd lengths that add up to ``numel``."""
    cuts = torch.randperm(numel - 1)[: tensors - 1].add(1).sort().values.tolist()
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, numel])]


@pytest.mark.parametrize("numel", [1_000_000, 10_000_000])
def test_lamb_is_its_reference(numel):
    sizes = lengths(numel, 300)
    ours = [list(torch.randn(numel, device=DEVICE).split(sizes)) for _ in range(4)]
    for square in ours[3]:
        square.square_()
    theirs = [[tensor.clone() for tensor in of] for of in ours]
    settings = LambSettings(0.9, 0.999, 1e-6, 0.01)
    factors = torch.rand(len(sizes), dtype=torch.float64, device=DEVICE)
    found = []
    for (w, g, m, v), kernels in ((ours, "on"), (theirs, "off")):
        found.append(measure_(w, g, m, v, settings, kernels=kernels))
        apply_(w, m, v, factors, settings, kernels=kernels)
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)
    for mine, want in zip(ours[0], theirs[0]):
        torch.testing.assert_close(mine, want, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("tensors", [1, 400])
@pytest.mark.parametrize("numel", [1_000_000, 10_000_000])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_adamw_is_that_of_fp64(numel, tensors, grad_dtype, record_property):
    """torch's AdamW in fp64 is the reference. Its fused fp32 kernel is not: on CUDA it rounds the
    betas to fp32, so 1 - 0.999, and each second moment with it, is off by 1.3e-5.
    """
    sizes = lengths(numel, tensors)
    master = torch.randn(numel, device=DEVICE)
    start = master.clone()

    def beside(dtype, **how):
        parts = [torch.nn.Parameter(part.to(dtype, copy=True)) for part in start.split(sizes)]
        halves = zip((parts[::2], parts[1::2]), (1e-2, 3e-3), (0.1, 0.0))
        groups = [{"params": half, "lr": lr, "weight_decay": d} for half, lr, d in halves if half]
        return parts, torch.optim.AdamW(groups, **how)

    exact, fused = beside(torch.float64, foreach=True), beside(torch.float32, fused=True)
    places = zip(sizes, itertools.accumulate([0, *sizes]))
    pieces = [FlatRun(size, index % 2, *[at] * 4) for index, (size, at) in enumerate(places)]
    tiles = Tiles.cut(pieces, DEVICE)
    mean, square = torch.zeros_like(master), torch.zeros_like(master)
    copy = torch.zeros(numel, dtype=torch.bfloat16, device=DEVICE)
    steps = torch.zeros(2, device=DEVICE)
    rows = [RowSettings(1e-2, weight_decay=0.1), RowSettings(3e-3, weight_decay=0.0)]
    divisor = torch.full((), 1.7, device=DEVICE)
    for _ in range(STEPS):
        grad = torch.randn(numel, device=DEVICE).to(grad_dtype)
        for parts, optimizer in (exact, fused):
            quotient = grad.to(parts[0].dtype) / divisor.to(parts[0].dtype)
            for parameter, part in zip(parts, quotient.split(sizes)):
                parameter.grad = part
            optimizer.step()
        coefficients = advance_(steps, settings_table(rows, DEVICE))
        adam_(master, grad, mean, square, tiles, coefficients, divisor=divisor, out=copy)

    def state_of(parts, optimizer):
        moments = ("exp_avg", "exp_avg_sq")
        yield torch.cat([p.data for p in parts])
        yield from (torch.cat([optimizer.state[p][name] for p in parts]) for name in moments)

    names = ("weight", "exp_avg", "exp_avg_sq")
    for name, ours, want, theirs in zip(
        names, (master, mean, square), state_of(*exact), state_of(*fused)
    ):
        off, allowed = ((each - want).abs().max().item() for each in (ours, theirs))
        record_property(f"largest error of {name}", f"{off:.1e}, of torch's {allowed:.1e}")
        torch.testing.assert_close(ours.double(), want, rtol=1e-6, atol=1e-7)
    assert torch.equal(copy, master.bfloat16())


def test_lion_is_ours_in_torch():
    numel = 1_000_003
    parameter = torch.nn.Parameter(torch.randn(numel, device=DEVICE))
    master, mean = parameter.detach().clone(), torch.zeros(numel, device=DEVICE)
    optimizer = Lion([parameter], lr=1e-3, weight_decay=0.1)
    tiles, steps = Tiles.cut([FlatRun(numel, 0, 0, 0, 0)], DEVICE), torch.zeros(1, device=DEVICE)
    rows = [RowSettings(1e-3, 0.9, 0.99, weight_decay=0.1, corrected=False)]
    for _ in range(STEPS):
        parameter.grad = torch.randn(numel, device=DEVICE)
        optimizer.step()
        lion_(master, parameter.grad, mean, tiles, advance_(steps, settings_table(rows, DEVICE)))
    # Where the two terms of the direction cancel, its sign is that of a rounding: those elements
    # are few, and off by two steps.
    off = (master - parameter.detach()).abs()
    assert off.max() <= 2e-3 * STEPS + 1e-6 and (off > 1e-6).float().mean() < 1e-4
    torch.testing.assert_close(mean, optimizer.state[parameter]["exp_avg"], rtol=1e-6, atol=1e-7)


def test_a_step_that_is_skipped_writes_nothing():
    numel = 100_001
    arrays = [torch.randn(numel, device=DEVICE).abs() for _ in range(4)]
    before = [array.clone() for array in arrays]
    steps, found = torch.full((1,), 4.0, device=DEVICE), torch.ones((), device=DEVICE)
    coefficients = advance_(steps, settings_table([RowSettings(1e-2)], DEVICE), found)
    adam_(*arrays, Tiles.cut([FlatRun(numel, 0, 0, 0, 0)], DEVICE), coefficients, found_inf=found)
    assert all(torch.equal(now, was) for now, was in zip(arrays, before)) and steps.item() == 4.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_is_that_of_fp64(dtype, record_property):
    buffer = torch.randn(20_000_001, device=DEVICE).to(dtype)
    parts = [*buffer.split(lengths(buffer.numel(), 300))]
    total = squared_norms(parts).sum()
    exact = buffer.double().square().sum()
    error = abs((total / exact).item() - 1)
    one_sum = abs((buffer.float().square().sum().double() / exact).item() - 1)
    record_property("relative error", f"{error:.1e}, of torch's fp32 sum {one_sum:.1e}")
    assert error < 1e-7
    buffer[12_345_678] = float("inf")
    assert squared_norms(parts).isfinite().logical_not().sum().item() == 1
    small = squared_norms([torch.full((100_000,), 1e-25, device=DEVICE)])
    assert small.item() == pytest.approx(1e-45, rel=1e-5)
