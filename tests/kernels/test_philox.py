"""The reference's random numbers are Triton's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from hf_zero.ops import dispatch, philox  # noqa: E402
from tests.helpers.checked_triton import checked_triton  # noqa: E402

DEVICE = torch.device("cpu") if dispatch.interpreted() else torch.device("cuda")


@triton.jit
def words_kernel(seed_ptr, out_ptr, start, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.randint(tl.load(seed_ptr), start + at), mask=at < count)


@triton.jit
def fours_kernel(seed_ptr, out_ptr, width, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    place = tl.program_id(0).to(tl.int64) * width + at
    a, b, c, d = tl.randint4x(tl.load(seed_ptr), place)
    out_ptr += tl.program_id(0) * 4 * width + at
    tl.store(out_ptr, a, mask=at < width)
    tl.store(out_ptr + width, b, mask=at < width)
    tl.store(out_ptr + 2 * width, c, mask=at < width)
    tl.store(out_ptr + 3 * width, d, mask=at < width)


LOW = 0xFFFFFFFF
STARTS = (0, 77, 2**31 - 50, 2**32 - 50, 2**40 + 3)


def test_words_are_those_that_triton_draws() -> None:
    for seed, start in itertools.product((0, 2**31 - 2, 0x123456789ABCDEF), STARTS):
        key = torch.tensor([seed], device=DEVICE)
        got = torch.empty(100, dtype=torch.int32, device=DEVICE)
        words_kernel[(1,)](key, got, start, 100, BLOCK=128)
        counters = torch.arange(start, start + 100, device=DEVICE)
        assert torch.equal(philox._philox(key, counters)[0], got.long() & LOW), (seed, start)


def test_first_words_are_those_of_the_reference() -> None:
    for seed, counter in ((0, (3, 1, 5 << 16 | 7)), (2**62 + 12345, (1, 2**31 + 1, 2**32 - 1))):
        with checked_triton() as settings:
            got = philox.first_words(seed, counter, 1000, DEVICE)
        assert settings.launches
        wanted = torch.empty_like(got)
        philox.FIRST_WORDS.reference(wanted, seed, *counter)
        place = torch.arange(1000, dtype=torch.int64)
        counters: Any = (place, *(torch.full_like(place, each) for each in counter))
        by_hand = philox.words(counters, torch.tensor(seed))[0]
        assert torch.equal(got, wanted) and torch.equal(got.cpu(), by_hand)


def test_rows_get_the_words_triton_draws_by_fours() -> None:
    key = torch.tensor([1234567], device=DEVICE)
    words = torch.empty(12, 37, dtype=torch.int32, device=DEVICE)
    fours_kernel[(3,)](key, words, 37, BLOCK=64)
    assert torch.equal(philox._words(key, 12, 37), words.long() & LOW)
    assert torch.equal(philox._words(key, 10, 37), words[:10].long() & LOW)
    for dropout in (0.0, 0.1, 0.5, 0.9):
        want = (words.long() & LOW) >= int(torch.tensor(dropout).double() * 2**32)
        assert torch.equal(philox.kept_rows(key, 12, 37, dropout), want)
        assert torch.equal(philox.kept_rows(key, 10, 37, dropout), want[:10])
