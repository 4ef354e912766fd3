"""``deepspeed.runtime.fp16.loss_scaler``: loss scales for scripts' loops, over the engine's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hf_zero.config.value_types import argument, number
from hf_zero.distributed.parallel_dims import check_size
from hf_zero.errors import ConfigError
from hf_zero.logging import JsonObject
from hf_zero.zero.reduce.losses import Fp16LossScaler

INITIAL_LOSS_SCALE = "init_scale"
SCALE_WINDOW = "scale_window"
DELAYED_SHIFT = "delayed_shift"
CONSECUTIVE_HYSTERESIS = "consecutive_hysteresis"
MIN_LOSS_SCALE = "min_scale"
POSITIVE = number(above=0)


class LossScalerBase:
    """A loss scale: multiplies the loss, divides the gradients, and reports overflows."""

    def __init__(self, scaler: Fp16LossScaler) -> None:
        self._scaler = scaler
        self._updates = 0

    @property
    def dynamic(self) -> bool:
        return self._scaler.dynamic

    @property
    def loss_scale(self) -> float:
        return self._scaler.scale

    cur_scale = loss_scale

    @property
    def scale_window(self) -> int:
        """Number of steps without an overflow after which the scale doubles."""
        return self._scaler.window

    @property
    def min_loss_scale(self) -> float:
        """Lower limit of the scale."""
        return self._scaler.minimum

    @property
    def cur_iter(self) -> int:
        """Number of updates so far."""
        return self._updates

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.loss_scale

    def scale_gradient(
        self, module: object, grad_in: Sequence[torch.Tensor | None], grad_out: object
    ) -> tuple[torch.Tensor | None, ...]:
        """Return ``grad_in`` times the scale, as a backward hook of a module."""
        return tuple(None if grad is None else self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        self.scale_loss(loss).backward(retain_graph=retain_graph)

    def update_scale(self, overflow: bool) -> None:
        """Update the scale after a step, or after one skipped because of ``overflow``."""
        self._scaler.update(overflow)
        self._updates += 1


class LossScaler(LossScalerBase):
    """A constant loss scale. Raises ConfigError if it is not above 0."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(Fp16LossScaler(argument("LossScaler", "scale", POSITIVE, scale)))


class EngineLossScaler(LossScalerBase):
    """The value of ``optimizer.loss_scaler`` and ``optimizer.loss_scale_config``: a view of an
    engine's scale, which the engine updates itself.
    """

    def __init__(self, scaler: Fp16LossScaler, steps: Callable[[], int]) -> None:
        super().__init__(scaler)
        self._steps = steps

    @property
    def cur_iter(self) -> int:
        return self._steps()

    @property
    def dynamic_loss_scale(self) -> bool:
        return self.dynamic

    def needs_scaler(self) -> bool:
        """Return whether the scale is dynamic: fp16 without a constant one."""
        return self.dynamic


class DynamicLossScaler(LossScalerBase):
    """A scale that halves after ``delayed_shift`` overflows and doubles after ``scale_window``
    steps without one.

    ``update_scale`` raises ConfigError for an overflow at ``min_scale``, unless
    ``raise_error_at_min_scale`` is false; the constructor for scales that are not above 0, and
    counts below 1.
    """

    def __init__(
        self,
        init_scale: float = 2.0**32,
        scale_window: int = 1000,
        min_scale: float = 1.0,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.half,
    ) -> None:
        for name, scale in (("init_scale", init_scale), ("min_scale", min_scale)):
            argument("DynamicLossScaler", name, POSITIVE, scale)
        check_size(scale_window, "scale_window", "steps")
        check_size(delayed_shift, "delayed_shift", "overflows")
        super().__init__(
            Fp16LossScaler(
                init_scale, True, scale_window, delayed_shift, min_scale, consecutive_hysteresis
            )
        )
        self.raise_error_at_min_scale = raise_error_at_min_scale

    def update_scale(self, overflow: bool) -> None:
        scaler = self._scaler
        stuck = scaler.at_floor and scaler.state_dict()["left"] <= 1
        if overflow and stuck and self.raise_error_at_min_scale:
            raise ConfigError(
                f"gradients overflow at the smallest loss scale, min_scale = {scaler.minimum:g}: "
                "the loss or the learning rate has diverged; write a smaller min_scale, or "
                "raise_error_at_min_scale=False to go on"
            )
        super().update_scale(overflow)


def CreateLossScaler(
    dtype: torch.dtype,
    static_loss_scale: float,
    dynamic_scaling: bool,
    dynamic_loss_args: JsonObject | None,
) -> LossScalerBase:
    """Return the dynamic or the constant scaler for fp16; a constant 1 for any other dtype."""
    if dtype == torch.half and dynamic_scaling:
        return DynamicLossScaler(dtype=dtype, **(dynamic_loss_args or {}))
    return LossScaler(static_loss_scale if dtype == torch.half else 1.0)
