"""``deepspeed.runtime.utils``."""

from hf_zero.integrations.telling import see_memory_usage

__all__ = ["see_memory_usage"]
