"""Compressed communication from its equations, on whole vectors in one process.

C(z) of a block is s * round(z / s), s = max|z| / 7 (127 in 8 bits). Blocks count from the start of
each owner's chunk. A reduce-scatter gives sum_i C(g_i), in fp32 and in the order of the ranks; a
gather of weights C(w); an update of whole copies xh = round(xh + C(x - xh)).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def C(z: Tensor, bits: int, block: int = 256) -> Tensor:
    """What is left of the vector ``z``, fp32, block by block."""
    top = float(2 ** (bits - 1) - 1)
    out = torch.empty_like(z, dtype=torch.float32)
    for at in range(0, z.numel(), block):
        part = z[at : at + block].float()
        most = part.abs().max()
        if not bool(most.isfinite()):
            out[at : at + block] = float("nan")
        elif float(most) == 0.0:
            out[at : at + block] = 0.0
        else:
            codes = torch.round(part * (torch.tensor(top) / most))
            out[at : at + block] = codes * (most / torch.tensor(top))
    return out


def by_owner(z: Tensor, owners: int, bits: int, block: int = 256) -> Tensor:
    """C of each owner's chunk of ``z``."""
    return torch.cat([C(chunk, bits, block) for chunk in z.chunk(owners)])


def compressible(layout: Any, block: int = 256) -> bool:
    """Whether a flat buffer holds matrices of a block and more alone, and a block on each rank."""
    tensors = all(len(slot.shape) > 1 and slot.numel >= block for slot in layout.slots)
    return tensors and layout.shards > 1 and layout.padded // layout.shards >= block


def flat_of(layout: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """``tensors``, by name, end to end as ``layout`` has them: [padded]; zeros where none is."""
    out = torch.zeros(layout.padded, dtype=dtype)
    for slot in layout.slots:
        if slot.name in tensors:
            out[slot.offset : slot.end] = tensors[slot.name].reshape(-1).to(dtype)
    return out


def reduced(layout: Any, grads: Sequence[Tensor], bits: int, block: int = 256) -> Tensor:
    """The sum over ranks of flat gradients [padded], as it comes out of a reduce-scatter."""
    if not compressible(layout, block):
        return torch.stack([grad.float() for grad in grads]).sum(0)
    total = by_owner(grads[0], layout.shards, bits, block)
    for grad in grads[1:]:
        total = total + by_owner(grad, layout.shards, bits, block)
    return total
