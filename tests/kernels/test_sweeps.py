"""Norms, casts and sums against the torch reference."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from hf_zero.ops import native
from hf_zero.ops.host import accumulate, cast
from hf_zero.ops.native import squared_norm
from tests.helpers.buffers import Guarded, same_bits

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
        assert math.isfinite(squared_norm(largest))
        if dtype != torch.float16:
            large = torch.full((100_000,), 1e30, dtype=dtype)
            assert squared_norm(large) == pytest.approx(1e65, rel=0.01)
    assert squared_norm(torch.empty(0)) == 0.0


def test_sums_are_the_same_on_every_instruction_set_and_thread_count() -> None:
    x, found = torch.randn(1_000_003), set()
    for name, threads in itertools.product(native.instruction_sets(), (1, 2, 5)):
        native.set_instruction_set(name)
        native.set_threads(threads)
        found.add(squared_norm(x))
    assert len(found) == 1


def test_what_is_not_finite_is_found_anywhere(isa: str) -> None:
    values = (float("nan"), float("inf"), -float("inf"))
    for dtype, numel in itertools.product(DTYPES, (1, 17, 513, 100_001)):
        x = torch.randn(numel).to(dtype)
        assert math.isfinite(squared_norm(x))
        for at, value in itertools.product({0, numel // 2, numel - 1}, values):
            spoilt = x.clone()
            spoilt[at] = value
            assert not math.isfinite(squared_norm(spoilt))


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
    """Ties, carries, denormals, overflow: neighbors in fp32, and of the middle to the next."""
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
