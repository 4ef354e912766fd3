"""The norm of gradients, summed in fp64 wherever they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_zero.core.comm import Comm
from hf_zero.core.flat import Flat
from hf_zero.ops import host

RUN = 1 << 14  # elements summed in fp32 before fp64 takes over


def squared_norm(flats: Sequence[Flat], comm: Comm, device: torch.device) -> torch.Tensor:
    """Sum of squares of the gradients of ``flats`` over the shard axis (0-dim, float64); not finite on overflow."""
    # Flat by flat, so that the sum is the same bits wherever some of them are.
    sums = [flat.squares if flat.squares is not None else sum_of_squares(flat.grad).to(device) for flat in flats if flat.grad is not None]
    total = torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64, device=device)
    comm.shard.all_reduce(total, "gradient norm").wait()
    return total


def sum_of_squares(grad: torch.Tensor) -> torch.Tensor:
    """The sum of squares of ``grad`` (0-dim, float64, on its device); not finite if an element is not."""
    if grad.device.type == "cpu" and grad.dtype != torch.float64:
        return torch.tensor(host.squared_norm(grad), dtype=torch.float64)
    # One long fp32 sum is wrong in the third digit, many short ones are not.
    even = grad.numel() // RUN * RUN
    pieces = [grad[:even].view(-1, RUN), grad[even:].view(1, -1)]
    kind = torch.float64 if grad.dtype == torch.float64 else torch.float32
    norms = [torch.linalg.vector_norm(piece, dim=1, dtype=kind).double() for piece in pieces if piece.numel()]
    return torch.cat(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=grad.device)
