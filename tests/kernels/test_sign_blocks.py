"""Momenta in one bit: what C loses, that error feedback loses nothing, and that the C++ and the
Triton kernels do as the reference does.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_zero.errors import KernelError
from hf_zero.ops import sign_blocks
from hf_zero.ops import sign_blocks_reference as plain
from hf_zero.ops.sign_blocks import SignBlocks
from tests.helpers.buffers import Guarded, same_bits

CHUNKS = (8, 32, 40, 256, 264, 2048, 2056, 40_008)


def spread(numel: int) -> Tensor:
    x = torch.randn(numel) * torch.randn(numel).exp()
    x[numel // 4 : numel // 3] = 0.0
    return x


def said(form: SignBlocks, messages: Tensor, chunk: int) -> Tensor:
    numel = messages.shape[0] * chunk
    return plain.values(messages, numel, form.block, form.scales_at(chunk))


def messages_of(form: SignBlocks, rows: int, chunk: int, numel: int | None = None) -> Tensor:
    """C of random numbers."""
    error, grad = torch.zeros(rows * chunk), spread(rows * chunk)
    out = form.empty(rows, chunk, error.device)
    numel = rows * chunk if numel is None else numel
    plain.compress(
        out, out.clone(), error, grad, 0.0, torch.ones(()), form.block, form.scales_at(chunk), numel
    )
    return out


def same_messages(form: SignBlocks, chunk: int, one: Tensor, other: Tensor, exact: bool) -> None:
    """Bits alike; scales alike, but for the order of a sum in Triton."""
    bits = -(-chunk // 8)
    assert same_bits(one[:, :bits], other[:, :bits])
    numel = one.shape[0] * chunk
    a, b = said(form, one, chunk), said(form, other, chunk)
    assert same_bits(a, b) if exact else torch.allclose(a, b, rtol=2e-6, atol=0), numel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", [32, 256, 2048])
def test_every_body_gives_what_the_reference_gives(every_body, block, dtype) -> None:
    form, exact = SignBlocks(block), every_body != "triton"
    chunks = CHUNKS if every_body not in ("triton", "reference") else (8, 40, 2056)
    for chunk in chunks:
        for rows, lacking in ((1, 0), (3, 5)):
            guarded, numel = Guarded(), rows * chunk - lacking
            at = form.scales_at(chunk)
            error, grad = guarded(spread(rows * chunk)), guarded(spread(rows * chunk).to(dtype))
            momentum, factor = messages_of(form, rows, chunk), torch.tensor(0.3)
            left, out = error.clone(), form.empty(rows, chunk, error.device)
            plain.compress(out, momentum, left, grad, 0.9, factor, block, at, numel)
            sent = form.compress(error, grad, momentum, 0.9, factor, numel)
            same_messages(form, chunk, sent, out, exact)
            close(error, left, exact)
            assert not error[numel:].any()

            own, average = momentum[:1].contiguous(), guarded(spread(chunk))
            kept, inside = average.clone(), min(chunk, numel - (rows - 1) * chunk)
            down = form.empty(1, chunk, error.device)
            plain.combine(down, out, own, kept, 0.9, block, at, inside)
            result = form.combine(out, average, own, 0.9, inside)
            same_messages(form, chunk, result, down, exact)
            close(average, kept, exact)

            weights = guarded(spread(rows * chunk))
            exponents = torch.randint(-126, 127, (rows * chunk,)).to(torch.int8)
            for begin, end in ((0, rows * chunk), (3, max(3, numel - 3))):
                after = weights.clone()
                plain.apply(after, momentum, exponents, 0.99, 1e-3, block, at, begin, end)
                form.apply(weights, momentum, exponents, 0.99, 1e-3, begin, end)
                assert same_bits(weights, after), (chunk, rows, begin)
            guarded.check()


def close(one: Tensor, other: Tensor, exact: bool) -> None:
    assert same_bits(one, other) if exact else torch.allclose(one, other, rtol=1e-5, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**31), st.sampled_from([32, 64, 256]))
def test_c_loses_at_most_what_there_is(eights: int, seed: int, block: int) -> None:
    """|z - C(z)| <= |z|, and z - C(z) is what is kept."""
    chunk, form = 8 * eights, SignBlocks(block)
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(chunk, generator=generator) * torch.randn(chunk, generator=generator).exp()
    error, empty = z.clone(), form.empty(1, chunk, z.device)
    sent = form.compress(error, torch.zeros(chunk), empty, 0.0, torch.ones(()), chunk)
    assert torch.equal(error, z - said(form, sent, chunk))
    assert float(error.norm()) <= float(z.norm()) * (1 + 1e-6)


def test_nothing_is_lost_over_steps(every_body) -> None:
    """The sum of what was sent and the last error is the sum of what was to be sent."""
    form, chunk = SignBlocks(32), 264
    error, none = torch.zeros(chunk), form.empty(1, chunk, torch.device("cpu"))
    wanted, sent = torch.zeros(chunk, dtype=torch.float64), torch.zeros(chunk, dtype=torch.float64)
    for _ in range(20):
        grad = spread(chunk)
        message = form.compress(error, grad, none, 0.0, torch.ones(()), chunk - 4)
        grad[chunk - 4 :] = 0.0
        wanted += grad
        sent += said(form, message, chunk) * (torch.arange(chunk) < chunk - 4)
    torch.testing.assert_close(sent + error, wanted, rtol=1e-5, atol=1e-4)


def test_signs(every_body) -> None:
    """Zero and minus zero are positive; the first of eight is the lowest bit."""
    form = SignBlocks(32)
    z = torch.tensor([0.0, -0.0, -1.0, 1.0, -1e-40, 1e-40, -3.0, 3.0])
    error, none = z.clone(), form.empty(1, 8, z.device)
    message = form.compress(error, torch.zeros(8), none, 0.0, torch.ones(()), 8)
    assert int(message[0, 0]) == 0b10101011
    size = math.sqrt(20 / 8)
    expected = torch.tensor([size, size, -size, size, -size, size, -size, size])
    torch.testing.assert_close(said(form, message, 8), expected, rtol=1e-6, atol=0.0)
    zeros = form.compress(torch.zeros(8), torch.zeros(8), none, 0.0, torch.ones(()), 8)
    assert not said(form, zeros, 8).any()


def test_few_large_elements_do_not_make_the_scale(every_body) -> None:
    """It is twice the mean magnitude at most: else more would be lost than there is."""
    form, z = SignBlocks(32), torch.zeros(32)
    z[5] = 3.0
    error, none = z.clone(), form.empty(1, 32, z.device)
    message = form.compress(error, torch.zeros(32), none, 0.0, torch.ones(()), 32)
    assert said(form, message, 32).tolist() == [2 * 3.0 / 32] * 32
    assert float(error.norm()) <= 3.0


def test_padding_is_in_no_scale(every_body) -> None:
    form, chunk = SignBlocks(32), 64
    error, none = torch.full((chunk,), 2.0), form.empty(1, chunk, torch.device("cpu"))
    message = form.compress(error, torch.zeros(chunk), none, 0.0, torch.ones(()), 40)
    assert said(form, message, chunk)[:40].tolist() == [2.0] * 40
    assert not error.any()


def test_bytes_of_a_message() -> None:
    assert SignBlocks(2048).nbytes(1 << 20) == (1 << 17) + (1 << 11)
    assert SignBlocks(2048).nbytes(8) == 32


def test_what_does_not_fit_is_refused() -> None:
    form = SignBlocks(32)
    message, values = form.empty(2, 40, torch.device("cpu")), torch.zeros(80)
    one = torch.ones(())
    cases: list[tuple[Any, str]] = [
        (lambda: SignBlocks(100), r"SignBlocks\(100\): there are blocks of 32"),
        (lambda: form.compress(values.half(), values, message, 0.9, one, 80), "error is .*float16"),
        (lambda: form.compress(values, values[:72], message, 0.9, one, 80), "of one length"),
        (lambda: form.compress(values, values, message[:, :16], 0.9, one, 80), "rows of 32 bytes"),
        (lambda: form.combine(message[:, :8], values[:40], message[:1], 0.9, 40), "rows of 32"),
        (lambda: form.apply(values, message, values, 1.0, 0.1, 0, 80), "exponents is .*float32"),
    ]
    for call, match in cases:
        with pytest.raises(KernelError, match=match):
            call()


def test_mean_squares_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """No temporary is longer than a piece, else each of them has eight bytes a weight."""
    rows, chunk, numel = 3, 130, 301
    exponents = torch.arange(rows * chunk).remainder(61).sub(30).to(torch.int8)
    values = plain.powers(exponents).double().square()
    values[numel:] = 0.0
    blocks = [part for row in values.view(rows, chunk) for part in row.split(32)]
    expected = [float(part.sum() / max(1, int((part > 0).sum()))) for part in blocks]
    longest: list[int] = []
    powers = plain.powers
    monkeypatch.setattr(sign_blocks, "PIECE", 64)
    monkeypatch.setattr(plain, "powers", lambda each: (longest.append(len(each)), powers(each))[1])
    found = SignBlocks(32).mean_squares(exponents, rows, numel)
    assert found.shape == (3, 5) and found.flatten().tolist() == pytest.approx(expected, rel=1e-12)
    assert max(longest) <= 64
