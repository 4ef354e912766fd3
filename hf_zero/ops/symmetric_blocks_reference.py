"""Symmetric blocks in plain torch, each line one rounding: see symmetric_blocks.py."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST = 2.0**-90  # a block whose largest magnitude is below it is zero


def quantize(
    out: Tensor, source: Tensor, minus: Tensor | None, bits: int, block: int, scales_at: int
) -> None:
    """Write the messages of the rows of ``source`` into ``out``, uint8 [rows, nbytes]."""
    rows = out.shape[0]
    values = source.view(rows, -1).float()
    if minus is not None:
        values = values - minus.view(rows, -1).float()
    numel = values.shape[1]
    blocks = -(-numel // block)
    parts = torch.nn.functional.pad(values, (0, blocks * block - numel)).view(rows, blocks, block)
    most, finite = parts.abs().amax(2), parts.isfinite().all(2)
    live = finite & (most >= SMALLEST)
    # tensors on both sides: torch would multiply by the reciprocal of a Python number
    top = torch.full_like(most, 7.0 if bits == 4 else 127.0)
    scales = torch.where(live, most / top, torch.where(finite, 0.0, float("nan"))).bfloat16()
    codes = (parts * (torch.ones_like(most) / scales.float()).unsqueeze(2)).round()
    codes = torch.where(live.unsqueeze(2), codes, 0.0).to(torch.int8).view(rows, -1)[:, :numel]
    data = codes.contiguous().view(torch.uint8)
    if bits == 4:
        data = torch.nn.functional.pad(data & 15, (0, numel % 2))
        data = data[:, ::2] | (data[:, 1::2] << 4)
    out[:, : data.shape[1]] = data
    out[:, scales_at : scales_at + 2 * blocks] = scales.contiguous().view(torch.uint8)


def dequantize(
    out: Tensor, messages: Tensor, bits: int, block: int, scales_at: int, add: bool
) -> None:
    """Decode the rows of ``messages`` into ``out``, or add them to it in fp32."""
    rows = messages.shape[0]
    values = _values(messages, out.numel() // rows, bits, block, scales_at)
    target = out.view(rows, -1)
    target.copy_(target.float() + values if add else values)


def dequantize_sum(out: Tensor, messages: Tensor, bits: int, block: int, scales_at: int) -> None:
    """Write the sum of the rows of ``messages``, in their order, into ``out``."""
    first, *others = _values(messages, out.numel(), bits, block, scales_at).unbind()
    out.copy_(first)
    for row in others:
        out.add_(row)


def _values(messages: Tensor, numel: int, bits: int, block: int, scales_at: int) -> Tensor:
    """Return the decoded values, fp32 [rows, numel]."""
    rows, blocks = messages.shape[0], -(-numel // block)
    codes = messages[:, : -(-numel * bits // 8)].contiguous()
    if bits == 4:
        codes = torch.stack([codes << 4, codes & 0xF0], 2).view(rows, -1)[:, :numel].contiguous()
    codes = codes.view(torch.int8)
    if bits == 4:
        codes = codes >> 4
    scales = messages[:, scales_at : scales_at + 2 * blocks].contiguous().view(torch.bfloat16)
    return codes.float() * scales.float().repeat_interleave(block, 1)[:, :numel]
