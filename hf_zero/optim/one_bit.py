"""Optimizers with a momentum sent in one bit after a warm-up: 1-bit Adam (Tang et al. 2021,
arXiv:2102.02888) and 0/1 Adam (Lu et al. 2022, arXiv:2202.06009), with DeepSpeed's settings.

This module has AdamW and the decision when to compress; the engine compresses
(hf_zero/compression), at stage 1. A step that is not compressed is AdamW's own. DeepSpeed accepts
``bias_correction`` and never corrects; here ``false`` does what DeepSpeed does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hf_zero.config import ZeroConfig
from hf_zero.config.low_bits import QuantizeTraining, WeightQuantization
from hf_zero.config.messages import CompressedCommunication
from hf_zero.config.optimizers import NAMED
from hf_zero.config.refusals import conflicts_in
from hf_zero.errors import ConfigError
from hf_zero.logging import logger
from hf_zero.ops.sign_blocks import BLOCKS
from hf_zero.optim import ranges
from hf_zero.optim.adam import Adam
from hf_zero.optim.elementwise import elementwise_base
from hf_zero.optim.tensor_sums import TensorSumOptimizer

BITS = "compressed_communication.bits"
_ADAM = (torch.optim.Adam, Adam)
_BLOCK = 2048
_IDLE = {
    **NAMED["OneBitAdam"].idle,
    "exp_avg_mask": "what never had a gradient is divided by what is usual in its tensor instead",
}


class SendsMomentum:
    """An optimizer that has steps in which the engine sends the momentum in one bit."""

    def is_dense(self, step: int) -> bool:
        """Return whether step number ``step``, from 1 on, is the optimizer's own (dense) step."""
        raise NotImplementedError

    def interval(self, step: int) -> int:
        """Return the interval of synchronization: ranks synchronize in its multiples."""
        return 1


class _OneBitAdamW(SendsMomentum, Adam):
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        cuda_aware: bool | None = None,
        comm_backend_name: str | None = None,
    ) -> None:
        check_momentum(type(self).__name__, betas)
        shared = (lr, betas, eps, weight_decay)
        super().__init__(
            params, *shared, bias_correction=bias_correction, decoupled_weight_decay=True
        )
        log_idle_settings(self, cuda_aware=cuda_aware, comm_backend_name=comm_backend_name)


def log_idle_settings(optimizer: torch.optim.Optimizer, **settings: object) -> None:
    """Log those of ``settings``, which DeepSpeed has, that are given: they have no effect."""
    given = {key for key, value in settings.items() if value is not None}
    if any("exp_avg_mask" in group for group in optimizer.param_groups):
        given.add("exp_avg_mask")
    for key, why in _IDLE.items():
        if key in given:
            logger.info("%s: %s has no effect: %s", type(optimizer).__name__, key, why)


class OneBitAdam(_OneBitAdamW):
    """AdamW for ``freeze_step`` steps; then the variance is frozen, and the momentum is sent in one
    bit with error feedback.

    Args:
        params: parameters or parameter groups.
        lr, betas, eps, weight_decay: as in AdamW; the decay is decoupled.
        freeze_step: the last dense step: 15 to 25 % of all, well after the learning rate has warmed
            up and not before 1 / (1 - betas[1]).
        bias_correction: correct the moments for their start at zero, which DeepSpeed never does.
        cuda_aware, comm_backend_name: accepted, without effect.

    Raises:
        ConfigError: a hyperparameter is out of range (a ValueError).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int = 100_000,
        bias_correction: bool = True,
        cuda_aware: bool | None = None,
        comm_backend_name: str | None = None,
    ) -> None:
        self.freeze_step = steps_of("OneBitAdam", "freeze_step", freeze_step)
        super().__init__(
            params, lr, betas, eps, weight_decay, bias_correction=bias_correction,
            cuda_aware=cuda_aware, comm_backend_name=comm_backend_name
        )  # fmt: skip

    def is_dense(self, step: int) -> bool:
        return step <= self.freeze_step


class ZeroOneAdam(_OneBitAdamW):
    """0/1 Adam: AdamW in ever rarer steps, which update the variance; in all others the momentum is
    sent in one bit with error feedback, later not in every step.

    Until ``var_freeze_step`` the interval between dense steps begins with 1 and doubles after each
    ``var_update_scaler`` of them; after it no step is dense. From there on the interval between
    steps that synchronize the ranks begins with 1 and doubles after each ``local_step_scaler``
    steps, up to ``local_step_clipper``. In the steps between them each rank uses its own momentum.

    Args:
        params: parameters or parameter groups.
        lr, betas, eps, weight_decay: as in AdamW; the decay is decoupled.
        var_freeze_step: the last step that may update the variance.
        var_update_scaler: updates of the variance after which their interval doubles.
        local_step_scaler: steps after which the interval between synchronizations doubles.
        local_step_clipper: upper bound of that interval; 1: every step synchronizes.
        bias_correction: correct the moments for their start at zero, which DeepSpeed never does.
        cuda_aware, comm_backend_name: accepted, without effect.

    Raises:
        ConfigError: a hyperparameter is out of range (a ValueError).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
        bias_correction: bool = True,
        cuda_aware: bool | None = None,
        comm_backend_name: str | None = None,
    ) -> None:
        self.var_freeze_step = steps_of("ZeroOneAdam", "var_freeze_step", var_freeze_step)
        self.var_update_scaler = steps_of("ZeroOneAdam", "var_update_scaler", var_update_scaler)
        self.local_step_scaler = steps_of("ZeroOneAdam", "local_step_scaler", local_step_scaler)
        self.local_step_clipper = steps_of("ZeroOneAdam", "local_step_clipper", local_step_clipper)
        super().__init__(
            params, lr, betas, eps, weight_decay, bias_correction=bias_correction,
            cuda_aware=cuda_aware, comm_backend_name=comm_backend_name
        )  # fmt: skip

    @cached_property
    def _phases(self) -> list[tuple[int, int]]:
        """(last step, interval of dense steps) of each phase until the variance is frozen."""
        phases, interval, last = list[tuple[int, int]](), 1, 0
        while last < self.var_freeze_step:
            # the last of the next ``var_update_scaler`` multiples of the interval
            last = (last // interval + self.var_update_scaler) * interval
            phases.append((min(last, self.var_freeze_step), interval))
            interval *= 2
        return phases

    def is_dense(self, step: int) -> bool:
        interval = next((every for last, every in self._phases if step <= last), None)
        return interval is not None and step % interval == 0

    def interval(self, step: int) -> int:
        doubled = max(0, step - self.var_freeze_step - 1) // self.local_step_scaler
        # bounded, so that the shift stays small; the clipper's bit length is always enough
        return min(self.local_step_clipper, 1 << min(doubled, self.local_step_clipper.bit_length()))


def check_momentum(name: str, betas: tuple[float, float]) -> None:
    """Raise ConfigError unless ``betas`` are two coefficients, whose first makes a momentum."""
    if not ranges.BETAS.contains(betas) or not betas[0] > 0.0:
        raise ConfigError(
            f"{name}: betas is {betas}; the momentum that travels needs a first one in (0, 1)"
        )


def steps_of(name: str, key: str, value: object) -> int:
    """Return ``value``, a number of steps. Raises ConfigError for what is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}: {key} is {value!r}; give a number of steps of at least 1")
    return value


def _always(step: int) -> int:
    return 1


@dataclass(frozen=True)
class OneBit:
    """The settings of a momentum that is sent in one bit: the dense steps, and the number of
    elements that share a scale.
    """

    is_dense: Callable[[int], bool]
    block: int = _BLOCK
    lamb: bool = False  # the update is LAMB's
    renews: bool = False  # dense steps after the first one in one bit update the variance
    local: bool = False  # some steps synchronize nothing
    interval: Callable[[int], int] = _always


def one_bit_of(config: ZeroConfig, optimizer: torch.optim.Optimizer | None) -> OneBit | None:
    """Return the one-bit settings of ``optimizer``, or of section ``compressed_communication`` for
    any Adam; None if the momentum is not sent in one bit.

    Raises:
        ConfigError: other settings of ``config`` are incompatible with it.
    """
    section = config.section_of(CompressedCommunication)
    ours = isinstance(optimizer, SendsMomentum)
    if optimizer is not None and section.freeze_step is not None and (ours or section.bits != 1):
        instead = f"write freeze_step in the parameters of {type(optimizer).__name__}"
        raise ConfigError(
            f"compressed_communication.freeze_step: {section.freeze_step} is for bits: 1 with Adam "
            f"or AdamW; {instead if ours else 'write bits: 1, or remove it'}"
        )
    if optimizer is None or (section.bits != 1 and not ours):
        return None
    name = type(optimizer).__name__
    is_dense: Callable[[int], bool]
    interval: Callable[[int], int] = _always
    if isinstance(optimizer, SendsMomentum):
        is_dense, interval = optimizer.is_dense, optimizer.interval
    else:
        if elementwise_base(type(optimizer)) not in (*_ADAM, torch.optim.AdamW):
            raise ConfigError(
                f"{BITS}: 1 sends the momentum of Adam or AdamW, and the optimizer is {name}; "
                f"take one of them, or {BITS}: 4, which goes with any element-wise optimizer"
            )
        freeze = section.freeze_step
        if freeze is None:
            raise ConfigError(
                f"{BITS}: 1 without compressed_communication.freeze_step: one bit does not do "
                "while the variance changes; write after how many steps it is frozen, 15 to 25 % "
                "of all and well after the learning rate has warmed up"
            )
        is_dense = freeze.__ge__
    local = isinstance(optimizer, ZeroOneAdam) and optimizer.local_step_clipper > 1
    _check(config, optimizer, local)
    lamb = isinstance(optimizer, TensorSumOptimizer)
    renews = isinstance(optimizer, ZeroOneAdam)
    return OneBit(is_dense, section.block_size or _BLOCK, lamb, renews, local, interval)


def _check(config: ZeroConfig, optimizer: torch.optim.Optimizer, local: bool) -> None:
    """Raise ConfigError for other settings that a momentum in one bit does not go with; ``local``:
    some steps synchronize nothing.
    """
    wrong = [*conflicts_in("one_bit", config.written)]
    rounds = {
        "quantize_training": config.section_of(QuantizeTraining).enabled,
        "compression_training": config.section_of(WeightQuantization).enabled,
    }
    for key, is_on in rounds.items():
        if local and is_on:
            why = "forwards compute with weights of the rank; set local_step_clipper: 1"
            wrong.append(f"{key}: {why}")
    adds_decay = elementwise_base(type(optimizer)) in _ADAM
    first = optimizer.param_groups[0]
    for group in optimizer.param_groups:
        if adds_decay and group["weight_decay"] and not group.get("decoupled_weight_decay"):
            wrong.append("weight_decay of Adam, which is added to the gradient: take AdamW")
        for key in ("amsgrad", "maximize"):
            if group.get(key):
                wrong.append(f"{key}: a group sets it; leave it off")
        for key in ("betas", "bias_correction"):
            if key in first and group.get(key, first[key]) != first[key]:
                wrong.append(f"{key}: groups differ; give all the same")
        if not 0.0 < float(group["betas"][0]) < 1.0:
            wrong.append(f"betas {group['betas']}: give a first one in (0, 1)")
    block = config.section_of(CompressedCommunication).block_size
    if block is not None and block not in BLOCKS:
        wrong.append(f"compressed_communication.block_size: {block} is none of {BLOCKS}")
    if wrong:
        name = type(optimizer).__name__
        raise ConfigError(f"{name} in 1 bit does not go with " + "; ".join(dict.fromkeys(wrong)))


def one_bit_at_one(config: ZeroConfig, optimizer: torch.optim.Optimizer | None) -> OneBit | None:
    """Return the one-bit settings of ``optimizer`` with ``config`` at stage 1, which a run with
    them has (:func:`as_sent`); None if the momentum is not sent in one bit.
    """
    at_one = config.placed(1, config.offload_optimizer, config.offload_param)
    return one_bit_of(at_one, optimizer)


def as_sent(config: ZeroConfig, one_bit: OneBit | None) -> ZeroConfig:
    """Return ``config`` with 1 bit and stage 1, which ``one_bit`` requires. At stage 0 no rank owns
    a shard of the momenta; at stage 2 gradients are reduced before the step.
    """
    if one_bit is None or (
        config.stage == 1 and config.section_of(CompressedCommunication).bits == 1
    ):
        return config
    settings = {"zero_optimization": {"stage": 1}, "compressed_communication": {"bits": 1}}
    return config.override(settings, "computed: the momentum travels in 1 bit")
