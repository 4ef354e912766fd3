"""8-bit blocks and stochastic rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_zero.errors import KernelError
from hf_zero.ops.host import adam
from hf_zero.ops.moment_blocks import BLOCK, Blocks, BlocksFormat
from tests.helpers.buffers import reference


def blocks_of(values: Tensor, signed: bool) -> Blocks:
    blocks = Blocks.zeros(values.numel(), signed)
    blocks.encode(values)
    return blocks


def spread(numel: int, signed: bool) -> Tensor:
    x = torch.randn(numel) * torch.randn(numel).mul(3).exp()
    return x if signed else x.square()


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_the_reference_within_half_a_step(isa: str, signed: bool) -> None:
    for numel in (0, 1, 3, 255, 256, 257, 40_001):
        values = spread(numel, signed)
        ours = blocks_of(values, signed)
        with reference():
            theirs = blocks_of(values, signed)
            assert torch.equal(theirs.decode(), ours.decode())
        assert torch.equal(ours.codes, theirs.codes) and torch.equal(ours.scales, theirs.scales)
        decoded = ours.decode()
        assert torch.equal(Blocks(ours.codes, ours.scales, signed).decode(), decoded)
    # every code survives, at every scale: a checkpoint in fp32 loses nothing
    codes = torch.arange(256, dtype=torch.uint8)
    if signed:
        codes[128] = 0  # the code of -0 is never given
    for scale in (1.0, 3.7, 1e-27, 2.0**-89, 3e38):
        blocks = Blocks(codes.clone(), torch.tensor([scale]), signed)
        again = blocks_of(blocks.decode(), signed)
        assert torch.equal(again.codes, codes) and torch.equal(again.scales, blocks.scales)
    values = spread(100 * BLOCK, signed)
    decoded = blocks_of(values, signed).decode()
    scale = values.view(-1, BLOCK).abs().amax(1, keepdim=True).expand(-1, BLOCK).reshape(-1)
    inside = values.abs() >= scale * 1.25 * 2.0 ** (-16 if signed else -32)
    assert bool(((decoded - values).abs()[inside] <= values.abs()[inside] / 16 * 1.0001).all())
    # the largest is exact
    assert torch.equal(decoded.view(-1, BLOCK).abs().amax(1), values.view(-1, BLOCK).abs().amax(1))


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_copy_into_another_format_is_encoded(dynamic: bool) -> None:
    values = spread(300, True)
    source = blocks_of(values, True)
    target = BlocksFormat(dynamic=dynamic).zeros(300)
    want = BlocksFormat(dynamic=dynamic).zeros(300)
    want.encode(source.decode())
    target.copy_(source)
    assert torch.equal(target.codes, want.codes) and torch.equal(target.scales, want.scales)
    again = target.clone()
    target.copy_(target.codec.zeros(300))
    assert target.decode().eq(0).all() and torch.equal(again.decode(), want.decode())


def test_a_second_moment_never_becomes_zero_and_what_is_not_finite_takes_its_block_along(isa):
    decoded = blocks_of(torch.logspace(-37, 2, 256), signed=False).decode()
    assert bool((decoded > 0).all())
    assert blocks_of(torch.zeros(256), signed=False).decode().eq(0).all()
    for bad in (float("nan"), float("inf"), -float("inf")):
        values = torch.ones(3 * BLOCK)
        values[BLOCK + 7] = bad
        decoded = blocks_of(values, signed=True).decode()
        assert bool(decoded[BLOCK : 2 * BLOCK].isnan().all())
        assert bool((decoded[:BLOCK] == 1).all())
        assert bool((decoded[2 * BLOCK :] == 1).all())
    assert blocks_of(torch.full((BLOCK,), 1e-40), signed=True).decode().eq(0).all()


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_stochastic_rounding_is_right_on_average(kind: str) -> None:
    """The same moments, rounded with 400 seeds: the mean approaches what fp32 has."""
    numel = 4 * BLOCK
    grad, mean, square = torch.randn(numel), torch.randn(numel), torch.rand(numel) + 0.1
    settings = {"step": 3, "lr": 0.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    settings |= {"weight_decay": 0.0, "decoupled": True}

    def kept() -> tuple[Blocks | Tensor, Blocks | Tensor]:
        if kind == "bf16":
            return mean.bfloat16(), square.bfloat16()
        return blocks_of(mean, True), blocks_of(square, False)

    start = [m.float() if isinstance(m, Tensor) else m.decode() for m in kept()]
    exact = (start[0].clone(), start[1].clone())
    adam(torch.zeros(numel), grad, *exact, **settings)
    sums, rounds = [torch.zeros(numel, dtype=torch.float64) for _ in range(2)], 400
    for seed in range(rounds):
        moments = kept()
        adam(torch.zeros(numel), grad, *moments, **settings, seed=seed)
        for total, moment in zip(sums, moments):
            total += moment.double() if isinstance(moment, Tensor) else moment.decode().double()
    for total, wanted in zip(sums, exact):
        # between neighbors, at most
        step = wanted.abs().double() * (2.0**-7 if kind == "bf16" else 2.0**-3)
        deviation = (total / rounds - wanted.double()) / (step / (2 * rounds**0.5))
        assert bool((deviation.abs() < 6).all()) and abs(float(deviation.mean())) < 0.25


def test_narrow_is_a_view_between_blocks() -> None:
    blocks = blocks_of(torch.randn(1000), signed=True)
    part = blocks.narrow(256, 744)
    assert torch.equal(part.decode(), blocks.decode()[256:]) and part.nbytes == 744 + 3 * 4
    part.encode(torch.zeros(744))
    assert bool((blocks.decode()[256:] == 0).all()) and bool((blocks.decode()[:256] != 0).any())
    for start, length in ((1, 10), (256, 10), (0, 1001), (-256, 256)):
        with pytest.raises(KernelError, match=rf"narrow\({start}, {length}\)"):
            blocks.narrow(start, length)
