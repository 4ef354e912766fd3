"""``deepspeed.checkpointing``: activation checkpointing."""

from hf_zero.integrations.checkpointing import checkpoint, configure, is_configured, reset

__all__ = ["checkpoint", "configure", "is_configured", "reset"]
