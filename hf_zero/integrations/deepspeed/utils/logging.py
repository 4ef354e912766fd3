"""``deepspeed.utils.logging``."""

from hf_zero.logs import logger

__all__ = ["logger"]
