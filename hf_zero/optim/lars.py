"""LARS: SGD with momentum and a learning rate per tensor, scaled by the ratio of the norms of the
tensor and of its gradient (You et al. 2017, arXiv:1708.03888).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_zero.errors import ConfigError
from hf_zero.ops.tensor_lists import squares
from hf_zero.optim.whole_tensor import Parts, TensorSumOptimizer


class LARS(TensorSumOptimizer):
    """LARS.

    Per tensor of two dimensions and more, with gradient ``g``, momentum ``b`` and weights ``w``::

        r = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps), or 1 where |w| or |g| is 0
        b <- momentum * b + lr * r * (g + weight_decay * w);    w <- w - b

    ``r`` is 1 for biases and norms, as in the implementation of the paper's authors.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        momentum: coefficient of the momentum, in [0, 1).
        weight_decay: times the weights, added to the gradient.
        trust_coefficient: eta of the paper.
        eps: added to the denominator of the ratio.
        nesterov: step by ``lr * r * (g + weight_decay * w) + momentum * b`` instead of ``b``.

    Raises:
        ConfigError: a hyperparameter is out of range (a ValueError).
        UnsupportedOptimizerError: in ``step``, a gradient is sparse.
    """

    SUMS = 2
    MOMENTS = ("momentum_buffer",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        nesterov: bool = False,
    ) -> None:
        if not float(lr) >= 0.0:
            raise ConfigError(f"LARS: lr is {lr}; give a learning rate of at least 0")
        if not 0.0 <= momentum < 1.0:
            raise ConfigError(f"LARS: momentum is {momentum}; give a number in [0, 1)")
        if min(weight_decay, eps) < 0.0 or not trust_coefficient > 0.0:
            raise ConfigError(
                f"LARS: weight_decay is {weight_decay}, eps {eps} and trust_coefficient "
                f"{trust_coefficient}; give numbers of at least 0, and the last one above"
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults)

    @staticmethod
    def measure(group: Mapping[str, Any], parts: Parts) -> Tensor:
        return squares([parts.weights, parts.gradients()])

    @staticmethod
    def apply(group: Mapping[str, Any], parts: Parts) -> None:
        (buffers,) = parts.moments
        decay, momentum = group["weight_decay"], group["momentum"]
        weights, gradients = parts.norms.unbind(1)
        ratio = group["trust_coefficient"] * weights / (gradients + decay * weights + group["eps"])
        scaled = (weights > 0) & (gradients > 0)
        scaled &= torch.tensor([len(shape) > 1 for shape in parts.shapes], device=ratio.device)
        factors = torch.where(scaled, ratio, torch.ones_like(ratio)) * float(group["lr"])
        update = list(torch._foreach_add(parts.gradients(), parts.weights, alpha=decay))
        torch._foreach_mul_(update, list(factors.to(parts.weights[0].dtype).unbind()))
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, update)
        if group["nesterov"]:
            torch._foreach_add_(update, buffers, alpha=momentum)
        torch._foreach_sub_(parts.weights, update if group["nesterov"] else buffers)
