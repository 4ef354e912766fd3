"""The norm of gradients on any device, summed in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_zero.device.pinned import upload
from hf_zero.ops import dispatch, host
from hf_zero.ops.flat_norm import RUNS, squared_norms
from hf_zero.zero.layout.gradient_buffer import GradientBuffer

RUN = 1 << 14  # elements summed in fp32 before fp64 takes over


def squared_norm(
    gradients: Sequence[GradientBuffer], device: torch.device, kernels: Any = "off"
) -> torch.Tensor:
    """Return the sum of squares of this rank's part of ``gradients`` (0-dim, float64); not finite
    on overflow.

    ``kernels`` is the configuration's: whether one kernel may read all gradients of a device.
    """
    # One by one: the sum has the same bits wherever some of them are.
    here = [each for each in gradients if each.shard is not None and each.grad_sq_norm is None]
    taken = dict(
        zip(here, sums_of_squares([each.shard for each in here if each.shard is not None], kernels))
    )
    # those in host memory are uploaded together, without a wait on the host
    here = [each for each in here if taken[each].device != device]
    if here:
        crossed = upload(torch.stack([taken[each] for each in here]), device)
        taken.update(zip(here, crossed.unbind()))
    sums = [
        each.grad_sq_norm if each.grad_sq_norm is not None else taken[each]
        for each in gradients
        if each.shard is not None
    ]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64, device=device)


def sums_of_squares(grads: Sequence[torch.Tensor], kernels: Any = "off") -> list[torch.Tensor]:
    """Return the sum of squares of each of ``grads`` (0-dim, float64, on its device); not finite if
    an element is not.
    """
    sums: dict[int, torch.Tensor] = {}
    by_device: dict[torch.device, list[int]] = {}
    for index, grad in enumerate(grads):
        if (
            grad.dtype != torch.float64
            and dispatch.wanted("optimizer", kernels, grad.device)
            and RUNS.name not in dispatch.broken()
        ):
            by_device.setdefault(grad.device, []).append(index)
        else:
            sums[index] = _sum_of_squares(grad)
    for indices in by_device.values():
        sums.update(zip(indices, squared_norms([grads[index] for index in indices]).unbind()))
    return [sums[index] for index in range(len(grads))]


def _sum_of_squares(grad: torch.Tensor) -> torch.Tensor:
    if grad.device.type == "cpu" and grad.dtype != torch.float64:
        return torch.tensor(host.squared_norm(grad), dtype=torch.float64)
    # A single long fp32 sum is wrong in the third digit, many short ones are not.
    even = grad.numel() // RUN * RUN
    pieces = [grad[:even].view(-1, RUN), grad[even:].view(1, -1)]
    kind = torch.float64 if grad.dtype == torch.float64 else torch.float32
    norms = [
        torch.linalg.vector_norm(piece, dim=1, dtype=kind).double()
        for piece in pieces
        if piece.numel()
    ]
    return (
        torch.cat(norms).square().sum()
        if norms
        else torch.zeros((), dtype=torch.float64, device=grad.device)
    )
