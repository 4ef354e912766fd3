"""The compute dtype of each parameter, and the loss scale of fp16 (Micikevicius et al., arXiv
1710.03740).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.zero.layout.parameter import given_class

# smaller floats are quantised weights, handled as raw bytes
CASTABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def is_raw(parameter: torch.Tensor) -> bool:
    """Whether the values of ``parameter`` are bytes that only their module can read, never cast."""
    return parameter.dtype not in CASTABLE or (
        given_class(parameter) is not nn.Parameter and not parameter.requires_grad
    )


def compute_dtype(
    name: str, parameter: torch.Tensor, precision: str, model: nn.Module
) -> torch.dtype:
    """Return the dtype that ``parameter`` computes in: the configured one, fp32 where the model
    keeps it, the own one of raw (quantised) and of frozen fp64 parameters.

    Raises ConfigError for a 16-bit trainable parameter in fp32 training: its updates would vanish
    without a master copy.
    """
    if is_raw(parameter):
        return parameter.dtype
    if precision == "fp32":
        if parameter.dtype in (torch.bfloat16, torch.float16) and parameter.requires_grad:
            kind = "bf16" if parameter.dtype == torch.bfloat16 else "fp16"
            raise ConfigError(
                f"parameter {name} is {parameter.dtype} but neither bf16 nor fp16 is enabled "
                "in the config; write "
                f'"{kind}": {{"enabled": true}}, or load the model with dtype=torch.float32'
            )
        return parameter.dtype
    if parameter.dtype == torch.float64 and not parameter.requires_grad:
        return parameter.dtype
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if precision == "fp16":
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if any(re.search(rf"(^|\.){re.escape(part)}(\.|$)", name) for part in kept):
        return torch.float32
    return COMPUTE[precision]


@dataclass(frozen=True)
class Scaling:
    """Factors before (``pre``) and after (``post``) the reduction, for the average over ranks and
    the weight of a micro-batch.

    A factor after the reduction costs a pass over this rank's chunk, one before it over the whole
    gradient. Scaling after it loses no small values; scaling before it cannot overflow, which
    matters on an fp16 wire without a loss scale.
    """

    pre: float
    post: float
    weight_after: bool = False

    @classmethod
    def over(
        cls,
        world: int,
        precision: str,
        prescale: bool = False,
        predivide: float = 1.0,
        wire: str | None = None,
        averages: bool = True,
    ) -> Scaling:
        """Return the factors for ``world`` ranks. ``prescale`` divides by ``predivide`` before and
        by the rest of ``world`` after; ``wire`` is the dtype sent, None: ``precision``. Without
        ``averages`` gradients are summed: ``post`` undoes the division.
        """
        if not averages:
            mean = cls.over(world, precision, prescale, predivide, wire)
            return replace(mean, post=mean.post * world)
        if prescale:
            return cls(1.0 / predivide, predivide / world, precision == "fp16")
        if wire == "fp16" and precision != "fp16":
            return cls(1.0 / world, 1.0)
        return cls(1.0, 1.0 / world, True)

    def before(self, weight: float, on_the_wire: bool = False) -> float:
        """Return the factor for a gradient taken in, onto the wire or into the accumulator."""
        return self.pre if on_the_wire and self.weight_after else self.pre * weight

    def after(self, weight: float, on_the_wire: bool = False) -> float:
        """Return the factor for the reduced sum."""
        return self.post * weight if on_the_wire and self.weight_after else self.post


class Fp16LossScaler:
    """The factor on the loss that keeps fp16 gradients representable; a constant 1 outside fp16.

    Dynamic: an overflow that has used up ``hysteresis`` halves the scale (not below ``minimum``),
    ``window`` steps without one double it; the first step of a run and the first after an overflow
    do not count, as in DeepSpeed's DynamicLossScaler, whose keys these are. With ``consecutive``
    each good step refills the hysteresis, else only a growth of the scale does.
    """

    def __init__(
        self,
        scale: float = 1.0,
        dynamic: bool = False,
        window: int = 1000,
        hysteresis: int = 2,
        minimum: float = 1.0,
        consecutive: bool = False,
    ):
        self.scale = float(scale)
        self.dynamic = dynamic
        self.window, self._hysteresis, self.minimum = window, hysteresis, minimum
        self._consecutive = consecutive
        self._left = hysteresis
        self._since = -1  # good steps that count; -1: the next one does not

    @classmethod
    def from_config(cls, config: Any) -> Fp16LossScaler:
        if config.precision != "fp16":
            return cls()
        fp16 = config.fp16
        if fp16.loss_scale:
            return cls(fp16.loss_scale)
        return cls(
            2.0**fp16.initial_scale_power,
            True,
            fp16.loss_scale_window,
            fp16.hysteresis,
            float(fp16.min_loss_scale),
            fp16.consecutive_hysteresis,
        )

    @property
    def at_floor(self) -> bool:
        """Whether the scale cannot be lowered any further."""
        return not self.dynamic or self.scale <= self.minimum

    def update(self, overflow: bool) -> None:
        """Adjust the scale after a step, or after a step that ``overflow`` has skipped."""
        if not self.dynamic:
            return
        if overflow:
            self._since = -1
            if self._left <= 1:
                self.scale = max(self.scale / 2.0, self.minimum)
            else:
                self._left -= 1
            return
        self._since += 1
        if self._consecutive:
            self._left = self._hysteresis
        if self._since >= self.window:
            self._since = 0
            self._left = self._hysteresis
            self.scale *= 2.0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "left": self._left, "since": self._since}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.scale, self._left, self._since = (
            float(state["scale"]),
            int(state["left"]),
            int(state["since"]),
        )
