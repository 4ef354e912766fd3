"""Norms, non-finite values, casts, sums, segments and checksums against the torch reference."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

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


def test_squared_norm(isa: str) -> None:
    for dtype in DTYPES:
        for numel in SIZES:
            x = torch.randn(numel + 1).to(dtype)[1:]
            exact = float(x.double().square().sum())
            if numel < 1000:
                exact = math.fsum(v * v for v in x.double().tolist())
            assert squared_norm(x) == pytest.approx(exact, rel=1e-13, abs=0)
        largest = torch.full((100,), torch.finfo(dtype).max, dtype=dtype)
        assert all_finite(largest) and math.isfinite(squared_norm(largest))
        if dtype != torch.float16:
            large = torch.full((100_000,), 1e30, dtype=dtype)
            assert squared_norm(large) == pytest.approx(1e65, rel=0.01)
    assert all_finite(torch.empty(0)) and squared_norm(torch.empty(0)) == 0.0


def test_sums_are_the_same_on_every_instruction_set_and_thread_count() -> None:
    x, found = torch.randn(1_000_003), set()
    sizes = (0, 1, 63, 64, 65, 65_535, 65_536, 65_537, 1_000_003)
    summed = [torch.randint(0, 256, (numel + 1,), dtype=torch.uint8)[1:] for numel in sizes]
    with reference():
        expected = [checksum(each.clone()) for each in summed]
    for name, threads in itertools.product(native.instruction_sets(), (1, 2, 5)):
        native.set_instruction_set(name)
        native.set_threads(threads)
        found.add(squared_norm(x))
        assert [checksum(each) for each in summed] == expected
    assert len(found) == 1


def test_what_is_not_finite_is_found_anywhere(isa: str) -> None:
    values = (float("nan"), float("inf"), -float("inf"))
    for dtype, numel in itertools.product(DTYPES, (1, 17, 513, 100_001)):
        x = torch.randn(numel).to(dtype)
        assert all_finite(x)
        for at, value in itertools.product({0, numel // 2, numel - 1}, values):
            spoilt = x.clone()
            spoilt[at] = value
            assert not all_finite(spoilt) and not math.isfinite(squared_norm(spoilt))


def test_cast_and_accumulate(isa: str) -> None:
    for source, numel in itertools.product(DTYPES, SIZES):
        for target in DTYPES:
            guarded = Guarded(offset=1)
            x = guarded(torch.randn(numel).mul(100).to(source))
            out = guarded(torch.zeros(numel, dtype=target))
            for scale in (1.0, 0.37):
                cast(out, x, scale)
                assert torch.equal(out, (x.float() * scale).to(target)), (source, target, numel)
            guarded.check()
        guarded = Guarded(offset=1)
        x, out = guarded(torch.randn(numel).to(source)), guarded(torch.randn(numel))
        expected = out + x.float() * 0.37
        accumulate(out, x, 0.37)
        assert torch.equal(out, expected), (source, numel)
        guarded.check()


def test_every_16_bit_number_and_those_beside_it_round_right(isa: str) -> None:
    """Ties, carries, denormals, overflow: neighbours in fp32, and of the middle to the next."""
    for dtype, half in ((torch.bfloat16, 1 << 15), (torch.float16, 1 << 12)):
        x = EVERY_HALF.view(dtype)
        exact, back = torch.zeros(x.numel()), torch.zeros_like(x)
        cast(exact, x)
        assert same_bits(exact, x.float())
        cast(back, exact)
        assert same_bits(back, x)
        bits = exact.view(torch.int32).to(torch.int64)
        beside = torch.cat([bits + d for d in (-1, 0, 1, half - 1, half, half + 1)])
        beside = torch.where(beside >= 2**31, beside - 2**32, beside)
        numbers = beside.to(torch.int32).view(torch.float32)
        numbers = torch.cat([numbers, numbers * 2.0**-11, numbers * 2.0**-20])
        out = torch.zeros(numbers.numel(), dtype=dtype)
        cast(out, numbers)
        assert same_bits(out, numbers.to(dtype))


def test_segments_there_and_back() -> None:
    draw = random.Random(0)
    kinds = [(3, torch.uint8), (50_000, torch.bfloat16), (3, torch.float32), (500, torch.int64)]
    for longest, dtype in kinds:
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
        parts = [whole[start : start + length] for start, length in runs]
        assert torch.equal(packed, torch.cat(parts))
        guarded = Guarded(offset=1)
        back, expected = guarded(torch.zeros_like(whole)), torch.zeros_like(whole)
        scatter(back, packed, runs)
        with reference():
            scatter(expected, packed, runs)
        assert torch.equal(back, expected)
        guarded.check()
    gather(torch.empty(0, dtype=dtype), whole, [])


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
    zeros = torch.zeros(4, dtype=torch.int64)
    assert checksum(zeros) == checksum(zeros.view(torch.uint8))
