"""Sign blocks in plain torch, each line one rounding: see sign_blocks.py."""

from __future__ import annotations

import torch
from torch import Tensor

LANES = 32


def compress(
    out: Tensor,
    momentum: Tensor,
    error: Tensor,
    grad: Tensor,
    beta: float,
    factor: Tensor,
    block: int,
    scales_at: int,
    numel: int,
) -> None:
    """Messages of ``error`` + ``beta`` * m + ``factor`` * ``grad`` into ``out``; what they lose
    into ``error``.
    """
    before = values(momentum, error.numel(), block, scales_at)
    wanted = (error + beta * before) + factor * grad.float()
    wanted[numel:] = 0.0
    error.copy_(wanted - _encode(out, wanted, block, scales_at, numel))


def combine(
    out: Tensor,
    came: Tensor,
    momentum: Tensor,
    average: Tensor,
    beta: float,
    block: int,
    scales_at: int,
    numel: int,
) -> None:
    """The message of the mean of ``came`` + ``beta`` * (``average`` - m) into ``out``."""
    chunk = average.numel()
    first, *others = values(came, came.shape[0] * chunk, block, scales_at).view(-1, chunk).unbind()
    total = first.clone()
    for row in others:
        total += row
    mean = total * torch.tensor(1.0 / came.shape[0])
    wanted = mean + beta * (average - values(momentum, chunk, block, scales_at))
    wanted[numel:] = 0.0
    sent = _encode(out, wanted, block, scales_at, numel)
    average.copy_(sent + (wanted - sent) * torch.tensor(1.0 / beta))


def apply(
    weights: Tensor,
    momentum: Tensor,
    exponents: Tensor,
    keep: float,
    step: float,
    block: int,
    scales_at: int,
    begin: int,
    end: int,
) -> None:
    """``keep`` * ``weights`` - ``step`` * m * powers(``exponents``) in elements [begin, end)."""
    sizes = values(momentum, weights.numel(), block, scales_at, torch.tensor(step))
    here = weights[begin:end]
    here.copy_(here * torch.tensor(keep) - sizes[begin:end] * powers(exponents[begin:end]))


def _places(like: Tensor) -> Tensor:
    """Of the bits of a byte, on the device of ``like``."""
    return torch.arange(8, dtype=torch.uint8, device=like.device)


def powers(exponents: Tensor) -> Tensor:
    """What each of ``exponents``, int8 from -126 to 126, stands for: about 2^(-k / 4), a number of
    three significant bits, exact in fp32.
    """
    return ((508 - exponents.int()) << 21).view(torch.float32)


def exponents_of(values: Tensor) -> Tensor:
    """Those of the numbers nearest to positive ``values``, which are wrong by an eighth at most."""
    return (508 - ((values.float().view(torch.int32) + (1 << 20)) >> 21)).clamp(-126, 126)


def values(
    messages: Tensor, numel: int, block: int, scales_at: int, times: Tensor | None = None
) -> Tensor:
    """What the rows of ``messages`` say, end to end: fp32 [numel]; scales ``times`` a number."""
    rows = messages.shape[0]
    chunk = numel // rows
    blocks = -(-chunk // block)
    bits = messages[:, : -(-chunk // 8), None] >> _places(messages) & 1
    scales = messages[:, scales_at : scales_at + 4 * blocks].contiguous().view(torch.float32)
    if times is not None:
        scales = scales * times
    sizes = scales.repeat_interleave(block, 1)[:, :chunk]
    return torch.where(bits.view(rows, -1)[:, :chunk] == 1, sizes, -sizes).reshape(-1)


def _sums(parts: Tensor) -> Tensor:
    """Over the last two dimensions, of which the last is LANES: lane by lane, then in pairs."""
    lanes = parts[:, :, 0].clone()
    for place in range(1, parts.shape[2]):
        lanes += parts[:, :, place]
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def _encode(out: Tensor, wanted: Tensor, block: int, scales_at: int, numel: int) -> Tensor:
    """Messages of ``wanted`` into ``out``; what they say, with zeros in the padding."""
    rows = out.shape[0]
    parts = wanted.view(rows, -1)
    chunk = parts.shape[1]
    blocks = -(-chunk // block)
    lacking = blocks * block - chunk
    padded = torch.nn.functional.pad(parts, (0, lacking)).view(rows, blocks, -1, LANES)
    sums, squares = _sums(padded.abs()), _sums(padded.square())
    places = torch.arange(rows * chunk, device=wanted.device).view(rows, chunk) < numel
    inside = torch.nn.functional.pad(places.float(), (0, lacking)).view(rows, blocks, block).sum(2)
    count = inside.clamp(min=1.0)
    root = (squares / count).double().sqrt().float()  # in fp32, torch's is not the nearest
    scales = torch.minimum(root, 2.0 * (sums / count))
    bits = torch.nn.functional.pad((parts >= 0).to(torch.uint8), (0, -chunk % 8))
    packed = (bits.view(rows, -1, 8) << _places(out)).sum(2, dtype=torch.uint8)
    out.zero_()
    out[:, : packed.shape[1]] = packed
    out[:, scales_at : scales_at + 4 * blocks] = scales.contiguous().view(torch.uint8)
    sizes = scales.repeat_interleave(block, 1)[:, :chunk]
    said = torch.where(parts >= 0, sizes, -sizes).reshape(-1)
    said[numel:] = 0.0
    return said
