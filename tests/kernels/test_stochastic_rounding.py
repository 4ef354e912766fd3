"""Stochastic rounding to bf16."""

from __future__ import annotations

import pytest
import torch

from hf_zero.errors import KernelError
from hf_zero.ops import native
from hf_zero.ops.stochastic_rounding import round_reference, round_stochastically
from tests.helpers.buffers import Guarded, reference, same_bits
from tests.helpers.checked_triton import checked_triton

KEY = 0xFEDCBA9876543210
FIRSTS = (0, 13, (1 << 32) - 777, (1 << 40) + 5)  # one of them on both sides of a span


def values(numel: int) -> torch.Tensor:
    """Values of many magnitudes with all kinds of special ones among them."""
    generator = torch.Generator().manual_seed(numel)
    x = torch.randn(numel, generator=generator) * torch.randn(numel, generator=generator).exp()
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-41, 1.5])
    x[: min(7, numel)] = special[: min(7, numel)]
    return x


def rounded(x: torch.Tensor, first: int, guarded: Guarded | None = None) -> torch.Tensor:
    out = torch.zeros(x.numel(), dtype=torch.bfloat16)
    out = out if guarded is None else guarded(out)
    round_stochastically(out, x, KEY, first)
    return out


@pytest.mark.parametrize("first", FIRSTS)
def test_all_bodies_give_the_same_bits_whatever_the_cut(first: int) -> None:
    pytest.importorskip("triton")
    for numel in (0, 1, 1023, 5000):
        guarded, x = Guarded(), values(numel)
        wanted = torch.empty(numel, dtype=torch.bfloat16)
        round_reference(wanted, x, KEY, first)
        with reference(), checked_triton() as settings:
            assert same_bits(rounded(x, first, guarded), wanted)
        assert settings.launches or not numel
        pieces = torch.empty_like(wanted)
        for at in range(0, numel, 999):
            round_stochastically(pieces[at : at + 999], x[at : at + 999], KEY, first + at)
        assert same_bits(pieces, wanted)
        guarded.check()


def test_every_instruction_set_gives_these_bits(isa: str) -> None:
    for first in FIRSTS:
        guarded, x = Guarded(offset=1), values(70_001)
        wanted = torch.empty(x.numel(), dtype=torch.bfloat16)
        round_reference(wanted, x, KEY, first)
        assert native.instruction_set() == isa
        assert same_bits(rounded(x, first, guarded), wanted)
        guarded.check()


def test_the_mean_is_kept_and_numbers_of_bf16_stay() -> None:
    """A quarter of the way between two neighbors, rounded up in a quarter of all cases."""
    low, step = 1.0, 2.0**-7
    out = rounded(torch.full((1 << 16,), low + step / 4), 0).float()
    assert set(out.tolist()) == {low, low + step}
    assert abs(float(out.eq(low + step).float().mean()) - 0.25) < 0.01
    round_stochastically(out.bfloat16().to("meta"), out.to("meta"), KEY)  # as in a simulation
    exact = values(5000).bfloat16()
    assert same_bits(rounded(exact.float(), 3), exact)


def test_what_cannot_be_rounded_is_refused() -> None:
    x = torch.zeros(4)
    with pytest.raises(KernelError, match="first is -1"):
        round_stochastically(x.bfloat16(), x, KEY, -1)
    with pytest.raises(KernelError, match="out"):
        round_stochastically(x.half(), x, KEY)
    with pytest.raises(KernelError, match="source"):
        round_stochastically(x.bfloat16(), x.double(), KEY)
