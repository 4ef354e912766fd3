"""What compressed collectives carry, on a GPU at real sizes: kernels give what their references
give there, and wait for nothing.
"""

from __future__ import annotations

import pytest
import torch

from hf_zero.ops import dispatch
from hf_zero.ops import sign_blocks_reference as signs
from hf_zero.ops import symmetric_blocks_reference as symmetric
from hf_zero.ops.sign_blocks import SignBlocks
from hf_zero.ops.symmetric_blocks import SymmetricBlocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHUNKS = (8, 2056, 1 << 20, (1 << 24) + 40)


@pytest.fixture(autouse=True)
def nothing_breaks():
    yield
    assert not dispatch.broken()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_symmetric_blocks(bits, dtype):
    form = SymmetricBlocks(bits)
    for chunk in CHUNKS:
        x = torch.randn(2 * chunk, device=DEVICE).to(dtype)
        messages, at = form.quantise(x, 2), form.scales_at(chunk)
        wanted = torch.zeros_like(messages)
        symmetric.quantise(wanted, x, None, bits, form.block, at)
        used = -(-chunk * bits // 8)
        assert torch.equal(messages[:, :used], wanted[:, :used]), chunk
        out, whole = torch.empty_like(x), torch.empty_like(x)
        form.dequantise(messages, out)
        symmetric.dequantise(whole, wanted, bits, form.block, at, False)
        assert torch.equal(out, whole), chunk


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sign_blocks(dtype):
    """Bits alike; scales alike but for the order of a sum."""
    form = SignBlocks()
    factor = torch.full((), 0.1, device=DEVICE)
    for chunk in CHUNKS:
        numel, at = 2 * chunk - 3, form.scales_at(chunk)
        error, grad = (torch.randn(2 * chunk, device=DEVICE) for _ in range(2))
        grad = grad.to(dtype)
        momentum = form.compress(
            error.clone(), grad, form.empty(2, chunk, error.device), 0.0, factor, numel
        )
        left, wanted = error.clone(), torch.zeros_like(momentum)
        signs.compress(wanted, momentum, left, grad, 0.9, factor, form.block, at, numel)
        sent = form.compress(error, grad, momentum, 0.9, factor, numel)
        used = -(-chunk // 8)
        # a sum near zero may have either sign where a scale differs in its last place
        differ = (sent[:, :used] != wanted[:, :used]).sum()
        assert int(differ) <= 2 + chunk // 1_000_000, chunk
        torch.testing.assert_close(
            form.values(sent, numel + 3).abs(),
            form.values(wanted, numel + 3).abs(),
            rtol=1e-5,
            atol=0,
        )
        weights = torch.randn(2 * chunk, device=DEVICE)
        after = weights.clone()
        exponents = torch.randint(-20, 20, (2 * chunk,), device=DEVICE).to(torch.int8)
        form.apply(weights, sent, exponents, 0.99, 1e-3, 3, numel)
        signs.apply(after, sent, exponents, 0.99, 1e-3, form.block, at, 3, numel)
        assert torch.equal(weights, after), chunk


def test_nothing_waits_for_the_device():

    form, chunk = SignBlocks(), 1 << 22
    error, grad = (torch.randn(2 * chunk, device=DEVICE) for _ in range(2))
    momentum, factor = form.empty(2, chunk, error.device), torch.ones((), device=DEVICE)
    form.compress(error, grad, momentum, 0.9, factor, 2 * chunk)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sent = form.compress(error, grad, momentum, 0.9, factor, 2 * chunk)
        own = form.combine(sent, error[:chunk].contiguous(), momentum[:1].contiguous(), 0.9, chunk)
        exponents = torch.zeros(chunk, dtype=torch.int8, device=DEVICE)
        form.apply(error[:chunk].contiguous(), own, exponents, 1.0, 1e-3, 0, chunk)
    finally:
        torch.cuda.set_sync_debug_mode("default")
