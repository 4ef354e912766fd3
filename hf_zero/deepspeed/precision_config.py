"""``deepspeed.runtime.precision_config``: the sections ``bf16`` and ``fp16`` as objects.

Needs pydantic, whose ValidationError they raise. What a training does with their keys is decided
where a whole configuration is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator, model_validator

from hf_zero.config.sections import Fp16Section
from hf_zero.deepspeed.config_model import DeepSpeedConfigModel


class DeepSpeedBF16Config(DeepSpeedConfigModel):
    """The section ``bf16``."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = False
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class DeepSpeedFP16Config(DeepSpeedConfigModel):
    """The section ``fp16``. What is for a dynamic scale alone may be any number without one."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: float = Field(Fp16Section.loss_scale, ge=0, allow_inf_nan=False)
    initial_scale_power: int = Fp16Section.initial_scale_power
    loss_scale_window: int = Fp16Section.loss_scale_window
    hysteresis: int = Fp16Section.hysteresis
    consecutive_hysteresis: bool = False
    min_loss_scale: float = Field(Fp16Section.min_loss_scale, allow_inf_nan=False)
    fp16_master_weights_and_grads: bool = False

    @field_validator("loss_scale", "loss_scale_window", "min_loss_scale", mode="before")
    @classmethod
    def _is_number(cls, value: Any) -> Any:
        """Refuse what pydantic would turn into a number."""
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError(f"must be a number, not {value!r}")
        return value

    @model_validator(mode="after")
    def _moves(self) -> DeepSpeedFP16Config:
        if self.enabled and self.dynamic and min(self.loss_scale_window, self.min_loss_scale) <= 0:
            raise ValueError(
                "loss_scale_window and min_loss_scale must be above 0 for a dynamic loss scale; "
                f"they are {self.loss_scale_window} and {self.min_loss_scale}"
            )
        return self

    @property
    def dynamic(self) -> bool:
        """Whether overflows move the scale."""
        return self.loss_scale == 0

    def initial_dynamic_scale(self) -> float:
        """The loss scale that dynamic scaling starts with."""
        return 2.0**self.initial_scale_power


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """The section of a whole configuration, under its former name ``bfloat16``, too."""
    return DeepSpeedBF16Config(**(param_dict.get("bf16") or param_dict.get("bfloat16") or {}))


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """The section of a whole configuration."""
    return DeepSpeedFP16Config(**param_dict.get("fp16", {}))
