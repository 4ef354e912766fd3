"""``deepspeed.runtime.config``."""

from hf_zero.errors import ConfigError as DeepSpeedConfigError

__all__ = ["DeepSpeedConfigError"]
