"""``deepspeed.runtime.engine``."""

from hf_zero.core.engine import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
