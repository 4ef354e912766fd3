"""DeepSpeed's optimizer classes by name: the classes of the same update (torch's, and ours over
host kernels), with its arguments.

Scripts construct them themselves, with and without offload. None has an update of its own, so the
engine treats them as instances of their base classes. An optimizer made from a configuration has
the base class itself, as in checkpoints, and passes ``isinstance`` for the class here that
DeepSpeed would have made.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import ParamsT

from hf_zero.deepspeed.modules import refuse
from hf_zero.deepspeed.subgroup_steps import SubGroupSteps
from hf_zero.optim import CPUAdagrad, CPULion, Lamb
from hf_zero.optim.adam import Adam
from hf_zero.optim.lion import Lion

if TYPE_CHECKING:
    from hf_zero.config import ZeroConfig


def _moments(fp32_optimizer_states: bool) -> str:
    return "fp32" if fp32_optimizer_states else "bf16"


class _Named(type):
    """A class whose ``isinstance`` also accepts optimizers that a configuration has made."""

    def __init__(cls, *args: object) -> None:
        super().__init__(*args)
        cls.made: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def __instancecheck__(cls, instance: object) -> bool:
        if super().__instancecheck__(instance):
            return True
        return isinstance(instance, torch.optim.Optimizer) and instance in cls.made


class FusedAdam(Adam, metaclass=_Named):
    """Adam, or AdamW if ``adam_w_mode`` is set."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        self.adam_w_mode = adam_w_mode
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad,
            decoupled_weight_decay=adam_w_mode, bias_correction=bias_correction,
        )  # fmt: skip


class DeepSpeedCPUAdam(SubGroupSteps, metaclass=_Named):
    """Adam, or AdamW if ``adamw_mode`` is set; moments in bf16 unless ``fp32_optimizer_states``."""

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        moments = _moments(fp32_optimizer_states)
        self.adam_w_mode = adamw_mode
        super().__init__(
            model_params, lr, betas, eps, weight_decay, amsgrad, adamw_mode=adamw_mode,
            bias_correction=bias_correction, moments=moments,
        )  # fmt: skip


class DeepSpeedCPUAdagrad(CPUAdagrad, metaclass=_Named):
    """Adagrad."""

    def __init__(
        self,
        model_params: ParamsT,
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
        if amsgrad:
            refuse("DeepSpeedCPUAdagrad(amsgrad=True)", "leave it at False: Adagrad has no maxima")
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


class FusedLion(Lion, metaclass=_Named):
    """Lion."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)


class FusedLamb(Lamb, metaclass=_Named):
    """LAMB."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if amsgrad:
            refuse("FusedLamb(amsgrad=True)", "leave it at False, as in DeepSpeed")
        if max_grad_norm:
            refuse("FusedLamb(max_grad_norm=)", "write gradient_clipping in the configuration")
        super().__init__(
            params, lr, betas, eps, weight_decay, bias_correction=bias_correction,
            max_coeff=max_coeff, min_coeff=min_coeff, eps_inside_sqrt=eps_inside_sqrt,
        )  # fmt: skip


class DeepSpeedCPULion(CPULion, metaclass=_Named):
    """Lion; the moment in bf16 unless ``fp32_optimizer_states`` is set."""

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params, lr=lr, betas=betas, weight_decay=weight_decay,
            moments=_moments(fp32_optimizer_states),
        )  # fmt: skip


_ON_DEVICE = {"adam": FusedAdam, "adamw": FusedAdam, "lion": FusedLion, "lamb": FusedLamb}
_OFFLOADED = {
    "adam": DeepSpeedCPUAdam,
    "adamw": DeepSpeedCPUAdam,
    "lion": DeepSpeedCPULion,
    "adagrad": DeepSpeedCPUAdagrad,
    "lamb": FusedLamb,
}


def name_made(optimizer: torch.optim.Optimizer, config: ZeroConfig) -> None:
    """Make ``optimizer``, which ``config`` names, an instance of the class that DeepSpeed would
    have made: for "Adam" the fused one, with offload the CPU one, with ``torch_adam`` neither.
    """
    section = config.optimizer
    if section is None or section.params.get("torch_adam"):
        return
    classes = _OFFLOADED if config.offload_optimizer.on else _ON_DEVICE
    cls = classes.get(section.type.lower())
    if cls is None:
        return
    cls.made.add(optimizer)
    if section.type.lower().startswith("adam"):
        optimizer.adam_w_mode = bool(  # type: ignore[attr-defined]
            section.type.lower() == "adamw" or section.params.get("adam_w_mode", True)
        )
