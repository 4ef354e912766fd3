"""Norms, non-finite values, casts, sums, segments and checksums against the torch reference."""

from __future__ import annotations

import math
import random

import pytest
import torch

from hf_zero.errors import KernelError
from hf_zero.ops import (
    accumulate,
    all_finite,
    cast,
    checksum,
    gather,
    native,
    scatter,
    squared_norm,
)
from tests.helpers.buffers import Guarded, reference, same_bits

SIZES = [0, 1, 3, 31, 32, 33, 511, 512, 513, 2**20 + 1]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EVERY_HALF = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_squared_norm(isa: str, dtype: torch.dtype) -> None:
    for numel in SIZES:
        x = torch.randn(numel + 1).to(dtype)[1:]
        exact = (
            math.fsum(v * v for v in x.double().tolist())
            if numel < 1000
            else float(x.double().square().sum())
        )
        assert squared_norm(x) == pytest.approx(exact, rel=1e-13, abs=0)
    if dtype != torch.float16:
        assert squared_norm(torch.full((100_000,), 1e30, dtype=dtype)) == pytest.approx(
            1e65, rel=0.01
        )


def test_squared_norm_is_the_same_on_every_instruction_set_and_thread_count() -> None:
    x = torch.randn(1_000_003)
    found = set()
    for name in native.instruction_sets():
        native.set_instruction_set(name)
        for threads in (1, 2, 5):
            native.set_threads(threads)
            found.add(squared_norm(x))
    assert len(found) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_found_anywhere(isa: str, dtype: torch.dtype, value: float) -> None:
    for numel in (1, 17, 513, 100_001):
        x = torch.randn(numel).to(dtype)
        assert all_finite(x)
        for at in {0, numel // 2, numel - 1}:
            spoilt = x.clone()
            spoilt[at] = value
            assert not all_finite(spoilt) and not math.isfinite(squared_norm(spoilt))


def test_the_largest_finite_numbers_are_finite(isa: str) -> None:
    for dtype in DTYPES:
        x = torch.full((100,), torch.finfo(dtype).max, dtype=dtype)
        assert all_finite(x) and math.isfinite(squared_norm(x))
    assert all_finite(torch.empty(0)) and squared_norm(torch.empty(0)) == 0.0


@pytest.mark.turns
@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_cast(isa: str, source: torch.dtype, target: torch.dtype) -> None:
    for numel in SIZES:
        guarded = Guarded(offset=1)
        x = guarded(torch.randn(numel).mul(100).to(source))
        out = guarded(torch.zeros(numel, dtype=target))
        for scale in (1.0, 0.37):
            cast(out, x, scale)
            assert torch.equal(out, (x.float() * scale).to(target))
        guarded.check()


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number_is_read_right(isa: str, source: torch.dtype) -> None:
    x = EVERY_HALF.view(source)
    out = torch.zeros(x.numel())
    cast(out, x)
    assert same_bits(out, x.float())
    back = torch.zeros_like(x)
    cast(back, out)
    assert same_bits(back, x)


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_beside_every_16_bit_one_round_right(isa: str, target: torch.dtype) -> None:
    """The number itself, its fp32 neighbours, and the middle to the next with its neighbours:
    ties, carries, denormals, overflow.
    """
    exact = EVERY_HALF.view(target).float()
    bits = exact.view(torch.int32).to(torch.int64)
    middle = 1 << (15 if target == torch.bfloat16 else 12)
    x = torch.cat([bits + d for d in (-1, 0, 1, middle - 1, middle, middle + 1)])
    x = torch.where(x >= 2**31, x - 2**32, x).to(torch.int32).view(torch.float32)
    x = torch.cat([x, x * 2.0**-11, x * 2.0**-20])
    out = torch.zeros(x.numel(), dtype=target)
    cast(out, x)
    assert same_bits(out, x.to(target))


@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_accumulate(isa: str, source: torch.dtype) -> None:
    for numel in SIZES:
        guarded = Guarded(offset=1)
        x, out = guarded(torch.randn(numel).to(source)), guarded(torch.randn(numel))
        expected = out + x.float() * 0.37
        accumulate(out, x, 0.37)
        assert torch.equal(out, expected)
        guarded.check()


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64], ids=str
)
def test_segments_there_and_back(dtype: torch.dtype) -> None:
    draw = random.Random(0)
    for longest in (3, 50_000):
        runs, at = [], 0
        for _ in range(40):
            at += draw.randrange(5)
            length = draw.randrange(longest)
            runs.append((at, length))
            at += length
        runs = runs[::2] + runs[1::2]
        whole = torch.randint(0, 100, (at + 3,)).to(dtype)
        packed = torch.zeros(sum(length for _, length in runs), dtype=dtype)
        gather(packed, whole, runs)
        assert torch.equal(
            packed, torch.cat([whole[start : start + length] for start, length in runs])
        )
        guarded = Guarded(offset=1)
        back = guarded(torch.zeros_like(whole))
        scatter(back, packed, runs)
        expected = torch.zeros_like(whole)
        with reference():
            scatter(expected, packed, runs)
        assert torch.equal(back, expected)
        guarded.check()
    gather(torch.empty(0, dtype=dtype), whole, [])


@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 65_535, 65_536, 65_537, 1_000_003])
def test_checksum_is_the_same_everywhere(numel: int) -> None:
    x = torch.randint(0, 256, (numel + 1,), dtype=torch.uint8)[1:]
    with reference():
        expected = checksum(x.clone())
    for name in native.instruction_sets():
        native.set_instruction_set(name)
        for threads in (1, 5):
            native.set_threads(threads)
            assert checksum(x) == expected


def test_checksum_sees_a_bit_a_swap_and_a_length() -> None:
    x = torch.randint(0, 256, (300_000,), dtype=torch.uint8)
    plain = checksum(x)
    for at in (0, 65_535, 65_536, 299_999):
        x[at] ^= 1
        assert checksum(x) != plain
        x[at] ^= 1
    swapped = torch.cat([x[65_536 : 2 * 65_536], x[:65_536], x[2 * 65_536 :]])
    assert checksum(swapped) != plain and checksum(x[:-1]) != plain
    sums = {checksum(torch.zeros(n, dtype=torch.uint8)) for n in range(200)}
    assert len(sums) == 200
    assert checksum(torch.zeros(4, dtype=torch.int64)) == checksum(
        torch.zeros(32, dtype=torch.uint8)
    )


def test_segments_outside_are_refused() -> None:
    x, out = torch.zeros(10), torch.zeros(4)
    for runs in ([(8, 4)], [(-1, 4)], [(2, -4)]):
        with pytest.raises(KernelError, match=r"the run \(.*\) lies outside of 10 elements"):
            gather(out, x, runs)
        with pytest.raises(KernelError, match=r"the run \(.*\) lies outside of 10 elements"):
            scatter(x, out, runs)
    with pytest.raises(KernelError, match="out has 4 elements and the others have 3"):
        gather(out, x, [(0, 3)])
    with pytest.raises(KernelError, match=r"out is torch\.float64"):
        gather(out.double(), x, [(0, 4)])
