"""Lion (Chen et al. 2023, arXiv:2302.06675): the sign of an interpolated momentum, with decoupled
weight decay. It keeps one state tensor (``exp_avg``) instead of Adam's two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.ops.updates import signs
from hf_zero.optim import ranges
from hf_zero.optim.segments import ParamGroup, ParamState

Tensors = list[Tensor]


class Lion(ranges.CheckedOptimizer):
    """Lion.

    Per element, with momentum ``m``, gradient ``g`` and parameter ``w``::

        w <- w * (1 - lr * weight_decay) - lr * sign(beta1 * m + (1 - beta1) * g)
        m <- beta2 * m + (1 - beta2) * g

    Args:
        params: parameters or parameter groups.
        lr: learning rate; the paper takes 3 to 10 times less than for AdamW.
        betas: coefficients of the update and of the momentum, each in [0, 1).
        weight_decay: decoupled weight decay; the paper takes 3 to 10 times more than for AdamW.
        maximize: ascend instead of descend.
        foreach: run over lists of tensors (None: if all tensors of a group have the same device and
            dtype).

    Raises:
        ConfigError: a hyperparameter is out of range (a ValueError).
        UnsupportedOptimizerError: in ``step``, a gradient is sparse.
    """

    RANGES = {**ranges.not_negative("lr", "weight_decay"), "betas": ranges.BETAS}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "maximize": maximize, "foreach": foreach})

    def __setstate__(self, state: ParamState) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("maximize", False)
            group.setdefault("foreach", None)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update each parameter that has a gradient; return the closure's loss, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params, grads, moments = self._collect(group)
            if not params:
                continue
            if group["maximize"]:
                grads = list(torch._foreach_neg(grads))
            foreach = group["foreach"]
            if foreach is None:
                foreach = len({(t.device, t.dtype) for t in (*params, *grads, *moments)}) == 1
            update = _foreach_update if foreach else _reference_update
            # a rate that is a tensor on a device is waited for
            update(params, grads, moments, float(group["lr"]), group)
        return loss

    def _collect(self, group: ParamGroup) -> tuple[Tensors, Tensors, Tensors]:
        """Return the parameters of ``group`` that have a gradient, with these and their moments,
        which are created before a first step.
        """
        params = [param for param in group["params"] if param.grad is not None]
        for param in params:
            if param.grad.is_sparse:
                raise UnsupportedOptimizerError(
                    f"Lion: the gradient of a parameter of shape {tuple(param.shape)} is sparse; "
                    "make it dense"
                )
            if not self.state[param]:
                moment = torch.zeros_like(param, memory_format=torch.preserve_format)
                self.state[param]["exp_avg"] = moment
        return params, [p.grad for p in params], [self.state[p]["exp_avg"] for p in params]


def _foreach_update(
    params: Tensors, grads: Tensors, moments: Tensors, lr: float, group: ParamGroup
) -> None:
    """Make the update over lists of tensors."""
    (beta1, beta2), weight_decay = group["betas"], group["weight_decay"]
    directions = torch._foreach_mul(moments, beta1)
    torch._foreach_add_(directions, grads, alpha=1 - beta1)
    # NaN has no sign, but it must not vanish: it propagates to the parameter
    nans = torch._foreach_abs(directions)
    torch._foreach_clamp_max_(nans, 0)
    torch._foreach_sign_(directions)
    torch._foreach_add_(directions, nans)
    del nans
    if weight_decay != 0:
        torch._foreach_mul_(params, 1 - lr * weight_decay)
    torch._foreach_add_(params, directions, alpha=-lr)
    del directions
    torch._foreach_mul_(moments, beta2)
    torch._foreach_add_(moments, grads, alpha=1 - beta2)


def _reference_update(
    params: Tensors, grads: Tensors, moments: Tensors, lr: float, group: ParamGroup
) -> None:
    """Update one tensor at a time, line by line as in the paper's algorithm 2 (the slow path)."""
    (beta1, beta2), weight_decay = group["betas"], group["weight_decay"]
    for param, grad, moment in zip(params, grads, moments):
        direction = signs((moment * beta1).add_(grad, alpha=1 - beta1))
        if weight_decay != 0:
            param.mul_(1 - lr * weight_decay)
        param.add_(direction, alpha=-lr)
        moment.mul_(beta2).add_(grad, alpha=1 - beta2)
