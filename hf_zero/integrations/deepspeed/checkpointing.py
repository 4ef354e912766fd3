"""``deepspeed.checkpointing``: activation checkpointing."""

from .runtime.activation_checkpointing import checkpointing
from .runtime.activation_checkpointing.checkpointing import *  # noqa: F403

__all__ = checkpointing.__all__
