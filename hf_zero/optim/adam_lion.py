"""Adam and AdamW with optional bias correction, and Lion: element-wise updates beside torch's own
classes.

Lion (Chen et al. 2023, arXiv:2302.06675) applies the sign of an interpolated momentum, with
decoupled weight decay; it keeps one state tensor (``exp_avg``) instead of Adam's two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hf_zero.errors import ConfigError, UnsupportedOptimizerError
from hf_zero.ops.updates import signs
from hf_zero.optim.segments import ParamGroup, ParamState


class Adam(torch.optim.Adam):
    """torch.optim.Adam, or AdamW by ``decoupled_weight_decay``, with one more setting per group.

    With ``bias_correction`` false the moments, which start at zero, are used uncorrected, as in
    BERT's AdamW (Devlin et al. 2018, arXiv:1810.04805)::

        w <- w - lr * m / (sqrt(v) + eps)

    Args:
        params: parameters or parameter groups.
        bias_correction: whether to correct the moments for their start at zero.
        settings: the other arguments of torch.optim.Adam.
    """

    def __init__(self, params: ParamsT, *args: Any, bias_correction: bool = True, **settings: Any):
        super().__init__(params, *args, **settings)
        self.defaults["bias_correction"] = bias_correction
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)

    def _init_group(self, group: ParamGroup, *lists: Any) -> object:
        """Collect the lists as torch.optim.Adam does. Without bias correction, count the steps here
        and replace them by infinity, where the correction factor is 1.
        """
        answer = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        steps: list[Tensor] = lists[-1]
        if steps and not group.get("bias_correction", True):
            skipped: Tensor | None = getattr(self, "found_inf", None)
            for step in steps:
                step += 1 if skipped is None else 1 - skipped.to(step.device)
            steps[:] = [torch.full_like(step, math.inf) for step in steps]
        return answer


class Lion(torch.optim.Optimizer):
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
        if not float(lr) >= 0.0:
            raise ConfigError(f"Lion: lr is {lr}; give a learning rate of at least 0")
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ConfigError(f"Lion: betas is {betas}; give two numbers in [0, 1)")
        if not weight_decay >= 0.0:
            raise ConfigError(f"Lion: weight_decay is {weight_decay}; give a number of at least 0")
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "weight_decay": weight_decay,
            "maximize": maximize,
            "foreach": foreach,
        }
        super().__init__(params, defaults)

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
            params, grads, moments = self._with_gradients(group)
            if not params:
                continue
            if group["maximize"]:
                grads = list(torch._foreach_neg(grads))
            foreach = group["foreach"]
            if foreach is None:
                foreach = len({(t.device, t.dtype) for t in (*params, *grads, *moments)}) == 1
            update = _foreach_update if foreach else _reference_update
            lr, (beta1, beta2) = float(group["lr"]), group["betas"]
            update(
                params,
                grads,
                moments,
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
            )
        return loss

    def _with_gradients(self, group: ParamGroup) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        params, grads, moments = [], [], []
        for param in group["params"]:
            if param.grad is None:
                continue
            if param.grad.is_sparse:
                raise UnsupportedOptimizerError(
                    f"Lion: the gradient of a parameter of shape {tuple(param.shape)} is "
                    "sparse; make it dense"
                )
            state = self.state[param]
            if not state:
                state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            params.append(param)
            grads.append(param.grad)
            moments.append(state["exp_avg"])
        return params, grads, moments


def _foreach_update(
    params: list[Tensor],
    grads: list[Tensor],
    moments: list[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None:
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
    params: list[Tensor],
    grads: list[Tensor],
    moments: list[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None:
    """Update one tensor at a time, line by line as in the paper's algorithm 2 (the slow path)."""
    for param, grad, moment in zip(params, grads, moments):
        direction = signs((moment * beta1).add_(grad, alpha=1 - beta1))
        if weight_decay != 0:
            param.mul_(1 - lr * weight_decay)
        param.add_(direction, alpha=-lr)
        moment.mul_(beta2).add_(grad, alpha=1 - beta2)
