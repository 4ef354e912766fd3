"""Blocks of compressed collectives and of moments on a GPU at real sizes: kernels agree with their
references there; encodings of collectives never wait for the device.
"""

from __future__ import annotations

import pytest
import torch

from hf_zero.ops import dispatch
from hf_zero.ops import sign_blocks_reference as signs
from hf_zero.ops import symmetric_blocks_reference as symmetric
from hf_zero.ops.host import adam
from hf_zero.ops.moment_blocks import Blocks
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
        messages, at = form.quantize(x, 2), form.scales_at(chunk)
        wanted = torch.zeros_like(messages)
        symmetric.quantize(wanted, x, None, bits, form.block, at)
        used = -(-chunk * bits // 8)
        assert torch.equal(messages[:, :used], wanted[:, :used]), chunk
        out, whole = torch.empty_like(x), torch.empty_like(x)
        form.dequantize(messages, out)
        symmetric.dequantize(whole, wanted, bits, form.block, at, False)
        assert torch.equal(out, whole), chunk


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sign_blocks(dtype):
    """Bits alike; scales alike but for the order of a sum."""
    factor = torch.full((), 0.1, device=DEVICE)
    for chunk in CHUNKS:
        numel = 2 * chunk - 3
        table = SignBlocks().cut((0, chunk // 3, chunk + 5), numel, 2, chunk)
        form = table._form(torch.device(DEVICE))
        error, grad = (torch.randn(2 * chunk, device=DEVICE) for _ in range(2))
        grad = grad.to(dtype)
        momentum = table.compress(error.clone(), grad, table.empty(error.device), 0.0, factor)
        left, wanted = error.clone(), torch.zeros_like(momentum)
        signs.compress(wanted, momentum, left, grad, 0.9, factor, *form)
        sent = table.compress(error, grad, momentum, 0.9, factor)
        found, expected = table.values(sent), table.values(wanted)
        # a sum near zero may have either sign where a scale differs in its last place
        assert int((found.sign() != expected.sign()).sum()) <= 2 + chunk // 1_000_000, chunk
        torch.testing.assert_close(found.abs(), expected.abs(), rtol=1e-5, atol=0)
        weights = torch.randn(2 * chunk, device=DEVICE)
        after, numbers = weights.clone(), torch.full(table.shape, 0.99, device=DEVICE)
        exponents = torch.randint(-20, 20, (2 * chunk,), device=DEVICE).to(torch.int8)
        table.apply(weights, sent, exponents, numbers, numbers * 1e-3)
        signs.apply(after, sent, exponents, numbers, numbers * 1e-3, *form)
        assert torch.equal(weights, after), chunk


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adam_with_moments_in_8_bits_gives_the_bits_of_the_host(dtype):
    settings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
    settings |= {"decoupled": True, "divisor": 3.0, "on_host": False}
    for numel in CHUNKS:
        weights, out = torch.randn(numel), torch.zeros(numel, dtype=torch.bfloat16)
        states = [
            (weights.to(device), out.to(device))
            + tuple(Blocks.zeros(numel, signed, True, device) for signed in (True, False))
            for device in ("cpu", DEVICE)
        ]
        for step in (1, 2, 3):
            grad = (torch.randn(numel) * torch.randn(numel).mul(3).exp()).to(dtype)
            for master, copy, mean, square in states:
                moved = grad.to(master.device)
                adam(master, moved, mean, square, step=step, out=copy, **settings)
        for host, device in zip(*states):
            parts = ("codes", "scales") if isinstance(host, Blocks) else ("data",)
            for part in parts:
                assert torch.equal(getattr(host, part), getattr(device, part).cpu()), numel


def test_nothing_waits_for_the_device():
    chunk = 1 << 22
    table = SignBlocks().cut((0, chunk // 2), 2 * chunk, 2, chunk)
    first = table.row(0)
    error, grad = (torch.randn(2 * chunk, device=DEVICE) for _ in range(2))
    momentum, factor = table.empty(error.device), torch.ones((), device=DEVICE)
    exponents = torch.zeros(chunk, dtype=torch.int8, device=DEVICE)
    numbers = torch.ones(first.shape, device=DEVICE)

    def step() -> None:
        sent = table.compress(error, grad, momentum, 0.9, factor)
        own = first.combine(sent, error[:chunk].contiguous(), momentum[:1].contiguous(), 0.9)
        first.apply(error[:chunk].contiguous(), own, exponents, numbers, numbers)
        table.spread(table.means(lambda start, stop: error[start:stop].abs()))

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
