"""Sign blocks in plain torch, each line one rounding: see sign_blocks.py. ``edges``, int64 [rows,
blocks + 1]: the first element of each block in its chunk and the end of the last one; they are
multiples of ``align``.
"""

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
    edges: Tensor,
    align: int,
    block: int,
    scales_at: int,
) -> None:
    """Write the messages of ``error`` + ``beta`` * m + ``factor`` * ``grad`` into ``out``, and
    their rounding errors into ``error``.
    """
    places, inside = _places(edges, block, error.numel())
    before = _said(momentum, edges, block, scales_at)
    unrounded = (_taken(error, places) + beta * before) + factor * _taken(grad.float(), places)
    unrounded *= inside
    _put(error, places, unrounded - _encode(out, unrounded, inside, scales_at))


def combine(
    out: Tensor,
    came: Tensor,
    momentum: Tensor,
    average: Tensor,
    beta: float,
    edges: Tensor,
    align: int,
    block: int,
    scales_at: int,
) -> None:
    """Write the message of the mean of ``came`` + ``beta`` * (``average`` - m) into ``out``."""
    places, inside = _places(edges, block, average.numel())
    first, *others = _said(came, edges, block, scales_at).split(1)
    total = first.clone()
    for row in others:
        total += row
    mean = total * _fp32(1.0 / came.shape[0])
    deviation = _taken(average, places) - _said(momentum, edges, block, scales_at)
    unrounded = (mean + beta * deviation) * inside
    sent = _encode(out, unrounded, inside, scales_at)
    _put(average, places, sent + (unrounded - sent) * _fp32(1.0 / beta))


def apply(
    weights: Tensor,
    momentum: Tensor,
    exponents: Tensor,
    keep: Tensor,
    step: Tensor,
    edges: Tensor,
    align: int,
    block: int,
    scales_at: int,
) -> None:
    """Compute ``keep`` * ``weights`` - ``step`` * m * powers(``exponents``); ``keep`` and ``step``
    are those of each block.
    """
    places, _ = _places(edges, block, weights.numel())
    sizes = _said(momentum, edges, block, scales_at, step)
    powers_of = powers(_taken(exponents, places))
    _put(weights, places, _taken(weights, places) * keep[:, :, None] - sizes * powers_of)


def _fp32(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float32, device="cpu")


def _places(edges: Tensor, block: int, numel: int) -> tuple[Tensor, Tensor]:
    """Return the places in the buffer of the elements of each block, ``numel`` for those beyond its
    end, and whether they are inside: [rows, blocks, block] both.
    """
    rows = edges.shape[0]
    at = edges[:, :-1, None] + torch.arange(block, device=edges.device)
    inside = at < edges[:, 1:, None]
    chunks = torch.arange(rows, device=edges.device)[:, None, None] * (numel // rows)
    return torch.where(inside, at + chunks, numel), inside


def _taken(values: Tensor, places: Tensor) -> Tensor:
    """Take ``values`` from their ``places``, zeros from beyond the last."""
    return torch.nn.functional.pad(values, (0, 1))[places]


def _put(values: Tensor, places: Tensor, new: Tensor) -> None:
    """Write ``new`` to the ``places`` of :func:`_taken`."""
    padded = torch.nn.functional.pad(values, (0, 1))
    padded[places] = new
    values.copy_(padded[:-1])


def _bits(like: Tensor) -> Tensor:
    """Return the places of the bits in a byte, on the device of ``like``."""
    return torch.arange(8, dtype=torch.uint8, device=like.device)


def powers(exponents: Tensor) -> Tensor:
    """Return the values of ``exponents``, int8 from -126 to 126: about 2^(-k / 4), a number of
    three significant bits, exact in fp32.
    """
    return ((508 - exponents.int()) << 21).view(torch.float32)


def exponents_of(values: Tensor) -> Tensor:
    """Return the exponents nearest to positive ``values``, with an error of at most an eighth."""
    return (508 - ((values.float().view(torch.int32) + (1 << 20)) >> 21)).clamp(-126, 126)


def _said(
    messages: Tensor, edges: Tensor, block: int, scales_at: int, times: Tensor | None = None
) -> Tensor:
    """Decode ``messages``: [messages, blocks, block]; scales ``times`` a number of each block."""
    rows, blocks = messages.shape[0], edges.shape[1] - 1
    bits = messages[:, : blocks * block // 8, None] >> _bits(messages) & 1
    sizes = messages[:, scales_at : scales_at + 4 * blocks].contiguous().view(torch.float32)
    if times is not None:
        sizes = sizes * times
    return torch.where(bits.view(rows, blocks, block) == 1, sizes[:, :, None], -sizes[:, :, None])


def _sums(parts: Tensor) -> Tensor:
    """Sum the last two dimensions, of which the last is LANES: lane by lane, then in pairs."""
    lanes = parts[:, :, 0].clone()
    for part in range(1, parts.shape[2]):
        lanes += parts[:, :, part]
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def _encode(out: Tensor, values: Tensor, inside: Tensor, scales_at: int) -> Tensor:
    """Write the messages of ``values`` [rows, blocks, block], zero outside ``inside``, into
    ``out``; return their decoded values.
    """
    rows, blocks, _ = values.shape
    parts = values.unflatten(2, (-1, LANES))
    sums, squares = _sums(parts.abs()), _sums(parts.square())
    count = inside.sum(2).clamp(min=1).float()
    root = (squares / count).double().sqrt().float()  # torch's fp32 root is not correctly rounded
    scales = torch.minimum(root, 2.0 * (sums / count))
    bits = (values >= 0).to(torch.uint8).view(rows, -1, 8)
    packed = (bits << _bits(out)).sum(2, dtype=torch.uint8)
    out.zero_()
    out[:, : packed.shape[1]] = packed
    out[:, scales_at : scales_at + 4 * blocks] = scales.contiguous().view(torch.uint8)
    return torch.where(values >= 0, scales[:, :, None], -scales[:, :, None])
