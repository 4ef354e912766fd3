"""DeepSpeed's optimizer classes by name: the classes of the same update (torch's, and ours over
host kernels), with its arguments.

Scripts construct them themselves, with offload and without. None has an update of its own, so the
engine treats them as instances of their base classes.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_zero.integrations.deepspeed.placeholders import refuse
from hf_zero.optim import CPUAdagrad, CPUAdam, CPULion
from hf_zero.optim.lion import Lion


def _need_bias_correction(name: str, bias_correction: bool) -> None:
    if not bias_correction:
        refuse(f"{name}(bias_correction=False)", "leave it at True")


def _moments(fp32_optimizer_states: bool) -> str:
    return "fp32" if fp32_optimizer_states else "bf16"


class FusedAdam(torch.optim.Adam):
    """Adam, or AdamW where ``adam_w_mode`` is set."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _need_bias_correction("FusedAdam", bias_correction)
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            decoupled_weight_decay=adam_w_mode,
        )


class DeepSpeedCPUAdam(CPUAdam):
    """Adam, or AdamW where ``adamw_mode`` is set; moments in bf16 where
    ``fp32_optimizer_states`` is not.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _need_bias_correction("DeepSpeedCPUAdam", bias_correction)
        moments = _moments(fp32_optimizer_states)
        super().__init__(
            model_params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            adamw_mode=adamw_mode,
            moments=moments,
        )


class DeepSpeedCPUAdagrad(CPUAdagrad):
    """Adagrad."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not fp32_optimizer_states:
            refuse(
                "DeepSpeedCPUAdagrad(fp32_optimizer_states=False)",
                "leave it at True: a sum of squares is kept in fp32",
            )
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


class FusedLion(Lion):
    """Lion."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)


class DeepSpeedCPULion(CPULion):
    """Lion; the moment in bf16 where ``fp32_optimizer_states`` is not set."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params,
            lr=lr,
            betas=betas,
            weight_decay=weight_decay,
            moments=_moments(fp32_optimizer_states),
        )
