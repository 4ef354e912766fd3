"""``DeepSpeedConfigModel``, the base class of scripts' own configurations, and the sections
``bf16`` and ``fp16`` as such objects (``deepspeed.runtime.precision_config``).

Needs pydantic, which hf-zero itself does not. ``ZeroConfig`` reads whole configurations.
"""

from __future__ import annotations

from functools import reduce

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from hf_zero.config.sections import Fp16Section
from hf_zero.config.value_types import SECTION, argument
from hf_zero.errors import ReplacedKeyError
from hf_zero.logging import JsonObject, logger


class DeepSpeedConfigModel(BaseModel):
    """A pydantic model that rejects unknown keys, and accepts "auto" for a value that is not given.

    ``Field(..., json_schema_extra={"deprecated": True, "new_param": "other", "new_param_fn": f})``
    is a deprecated key: its value is passed to f, whose result sets the field ``other``
    ("section.other": of a part). ``deprecated_msg`` is logged with it; with ``set_new_param:
    False`` the value stays where it is. Raises ReplacedKeyError if both are given.
    """

    model_config = ConfigDict(
        validate_default=True, validate_assignment=True, use_enum_values=True,
        populate_by_name=True, extra="forbid", arbitrary_types_allowed=True,
        protected_namespaces=(),
    )  # fmt: skip

    def __init__(self, strict: bool = False, **data: object) -> None:
        if not strict:
            data = {key: value for key, value in data.items() if value != "auto"}
        super().__init__(**data)
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if (
                isinstance(extra, dict)
                and extra.get("deprecated")
                and name in self.model_fields_set
            ):
                self._replace(name, extra)

    def _replace(self, name: str, extra: JsonObject) -> None:
        """Move the value of the deprecated key ``name`` to the field that replaces it."""
        path = extra.get("new_param", "")
        instead, more = f"; write {path}" if path else "", extra.get("deprecated_msg", "")
        logger.warning("the key %s is deprecated%s. %s", name, instead, more)
        if not path or not extra.get("set_new_param", True):
            return
        *parts, new = path.split(".")
        holder = reduce(getattr, parts, self)
        if new in holder.model_fields_set:
            raise ReplacedKeyError(
                f"{name} and {path}, which has taken its place, are both given; remove {name}"
            )
        value = extra.get("new_param_fn", lambda value: value)(getattr(self, name))
        delattr(self, name)
        setattr(holder, new, value)


class DeepSpeedBF16Config(DeepSpeedConfigModel):
    """The section ``bf16``."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = False
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class DeepSpeedFP16Config(DeepSpeedConfigModel):
    """The section ``fp16``. Fields for a dynamic scale may be any number without one."""

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
    def _is_number(cls, value: object) -> object:
        """Reject values that pydantic would convert to a number."""
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
        """Return whether overflows change the scale."""
        return self.loss_scale == 0

    def initial_dynamic_scale(self) -> float:
        """Return the initial loss scale of dynamic scaling."""
        return 2.0**self.initial_scale_power


def get_bfloat16_config(param_dict: JsonObject) -> DeepSpeedBF16Config:
    """Return the section of a whole configuration, also under its former name ``bfloat16``. Raises
    ConfigError for what is no section.
    """
    return DeepSpeedBF16Config(**_section(param_dict, "bf16", "bfloat16"))


def get_float16_config(param_dict: JsonObject) -> DeepSpeedFP16Config:
    """Return the section of a whole configuration. Raises ConfigError for what is no section."""
    return DeepSpeedFP16Config(**_section(param_dict, "fp16"))


def _section(param_dict: JsonObject, *names: str) -> JsonObject:
    """Return the first section of ``names`` that is written."""
    for name in names:
        if param_dict.get(name) is not None:
            section: JsonObject = argument("param_dict", name, SECTION, param_dict[name])
            return section
    return {}
