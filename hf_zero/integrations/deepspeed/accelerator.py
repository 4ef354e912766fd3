"""``deepspeed.accelerator``."""

from hf_zero.integrations.device import get_accelerator

__all__ = ["get_accelerator"]
