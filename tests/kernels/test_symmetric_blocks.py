"""Blocks of 4 and 8 bits: what they lose, and that the C++ and the Triton kernel give the bits of
the reference.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from hf_zero.ops import symmetric_blocks_reference as plain
from hf_zero.ops.symmetric_blocks import SymmetricBlocks
from tests.helpers.buffers import Guarded, same_bits

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 3, 8, 31, 255, 256, 257, 1000, 2049, 40_001)
FORMS = [(4, 256), (8, 256), (4, 32), (8, 1024)]


def spread(numel: int, dtype: torch.dtype) -> Tensor:
    """Numbers of many magnitudes, blocks of zeros and of hardly anything among them."""
    x = torch.randn(numel) * torch.randn(numel).exp()
    x[300:600] = 0.0
    x[700:1100] *= 1e-30
    return x.to(dtype)


def parts(form: SymmetricBlocks, messages: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """The bytes of ``messages`` that mean something: codes, and scales."""
    at = form.scales_at(numel)
    codes = messages[:, : -(-numel * form.bits // 8)]
    return codes, messages[:, at : at + 2 * form.scales(numel)].contiguous().view(torch.bfloat16)


def agree(form: SymmetricBlocks, numel: int, one: Tensor, other: Tensor) -> bool:
    pairs = zip(parts(form, one, numel), parts(form, other, numel))
    return all(same_bits(a, b) for a, b in pairs)


QUANTIZE, DEQUANTIZE, SUM = plain.quantize, plain.dequantize, plain.dequantize_sum


def expected(form: SymmetricBlocks, x: Tensor, rows: int, minus: Tensor | None = None) -> Tensor:
    numel = x.numel() // rows
    out = torch.zeros(rows, form.nbytes(numel), dtype=torch.uint8)
    QUANTIZE(out, x, minus, form.bits, form.block, form.scales_at(numel))
    return out


def test_every_body_gives_the_bits_of_the_reference(every_body) -> None:
    sizes = SIZES if every_body not in ("triton", "reference") else (1, 31, 257, 2049)
    for number, form in enumerate(FORMS):
        blocks, dtype = SymmetricBlocks(*form), FLOATS[number % 3]
        for numel, rows in itertools.product(sizes, (1, 3)):
            guarded = Guarded()
            x, minus = guarded(spread(rows * numel, dtype)), guarded(torch.randn(rows * numel))
            for less in (None, minus):
                messages = blocks.quantize(x, rows, less)
                wanted = expected(blocks, x, rows, less)
                assert agree(blocks, numel, messages, wanted), (numel, rows, less is None)
            at = blocks.scales_at(numel)
            out = guarded(torch.randn(rows * numel).to(dtype))
            for add in (False, True):
                whole = out.clone()
                DEQUANTIZE(whole, messages, *form, at, add)
                blocks.dequantize(messages, out, add)
                assert same_bits(out, whole), (numel, rows, add)
            total, sums = guarded(torch.randn(numel)), torch.empty(numel)
            SUM(sums, messages, *form, at)
            blocks.dequantize_sum(messages, total)
            assert same_bits(total, sums), (numel, rows)
            guarded.check()


def test_ties_go_to_the_even_code_and_what_is_not_finite_takes_its_block_along(every_body) -> None:
    """The first of two codes is in the lower half of its byte."""
    for bits, top in ((4, 7), (8, 127)):
        x = torch.tensor([top, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -top, -0.0], dtype=torch.float32)
        form, back = SymmetricBlocks(bits, 32), torch.empty(9)
        form.dequantize(form.quantize(x), back)
        assert back.tolist() == [top, 0, 2, 2, 0, -2, -2, -top, 0]
    messages = SymmetricBlocks(4, 32).quantize(torch.tensor([7.0, -1.0, 3.0]))
    assert messages[0, :2].tolist() == [7 | (15 << 4), 3] and messages.shape == (1, 32)
    form, sevens = SymmetricBlocks(4, 32), torch.full((100,), 7.0)
    for bad in (float("nan"), float("inf"), -float("inf")):
        x, back, total = sevens.clone(), torch.zeros(100), torch.zeros(100)
        x[40] = bad
        form.dequantize(form.quantize(x), back)
        assert bool(back[32:64].isnan().all()) and bool((back[:32] == 7).all())
        assert bool((back[64:] == 7).all())
        form.dequantize_sum(form.quantize(torch.cat([sevens, x]), 2), total)
        assert bool(total[32:64].isnan().all()) and bool((total[64:] == 14).all())
    form = SymmetricBlocks(4)
    assert form.nbytes(1 << 20) == (1 << 19) + (1 << 13) and form.nbytes(8) == 32
    assert SymmetricBlocks(8).nbytes(1 << 20) == (1 << 20) + (1 << 13)
