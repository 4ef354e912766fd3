"""DeepSpeed's optimizer classes by name: the torch classes of the same update, with DeepSpeed's arguments.

Accelerate swaps a script's optimizer for one of these under offload, and scripts build them by hand. None has an update
of its own, so the engine takes them for the torch classes that they are.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_zero.integrations.not_built import refuse
from hf_zero.optim.lion import Lion


def _need_bias_correction(name: str, bias_correction: bool) -> None:
    if not bias_correction:
        refuse(f"{name}(bias_correction=False)", "leave it at True")


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
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, decoupled_weight_decay=adam_w_mode
        )


class DeepSpeedCPUAdam(torch.optim.Adam):
    """Adam, or AdamW where ``adamw_mode`` is set."""

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
        if not fp32_optimizer_states:
            refuse("DeepSpeedCPUAdam(fp32_optimizer_states=False)", "leave it at True: moments are kept in fp32")
        super().__init__(
            model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, decoupled_weight_decay=adamw_mode
        )


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
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
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


class FusedLion(Lion):
    """Lion."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0, set_grad_none: bool = True
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)


class DeepSpeedCPULion(Lion):
    """Lion."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr=lr, betas=betas, weight_decay=weight_decay)
