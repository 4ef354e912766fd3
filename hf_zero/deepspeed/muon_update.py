"""``deepspeed.runtime.zero.muon.original_muon``: the update of hf_zero.optim.muon.Muon as a
function of one gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import _muon

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7


def zeropower_via_newtonschulz5(G: Tensor, steps: int) -> Tensor:
    """Return the matrix, or each of a batch of matrices ``G`` [..., rows, columns], made nearly
    orthogonal by ``steps`` iterations of Newton and Schulz, in bf16.
    """
    if G.ndim == 2:
        return _muon._zeropower_via_newtonschulz(G, COEFFICIENTS, steps, EPS)
    matrices = G.reshape(-1, *G.shape[-2:]).unbind()
    return torch.stack([zeropower_via_newtonschulz5(each, steps) for each in matrices]).view(
        G.shape
    )


def muon_update(
    grad: Tensor,
    momentum: Tensor,
    beta: float = 0.95,
    ns_steps: int = 5,
    nesterov: bool = True,
    ns_method: str = "gram",
    is_expert_group: bool = False,
    num_heads: int | None = None,
) -> Tensor:
    """Return Muon's update of the weights, before the learning rate; ``momentum`` is updated in
    place, unless ``grad`` is not finite.

    grad: a matrix, or filters of a convolution; with ``is_expert_group`` a batch of matrices, and
    with ``num_heads`` one matrix whose rows form that many matrices. ``ns_method`` affects only the
    cost of the iteration; here it is always the ordinary one.
    """
    finite = torch.isfinite(grad).all()
    momentum.copy_(torch.where(finite, momentum.lerp(grad, 1 - beta), momentum))
    direction = grad.lerp(momentum, beta) if nesterov else momentum
    if num_heads is not None:
        matrices = direction.view(num_heads, -1, direction.shape[-1])
    else:
        matrices = direction if is_expert_group or direction.ndim == 2 else direction.flatten(1)
    rows, columns = matrices.shape[-2:]
    update = zeropower_via_newtonschulz5(matrices, ns_steps) * math.sqrt(max(1, rows / columns))
    update = update.to(grad.dtype).view(direction.shape if num_heads else update.shape)
    return torch.where(finite, update, torch.full_like(update, torch.nan))
