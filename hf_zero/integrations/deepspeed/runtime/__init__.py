"""``deepspeed.runtime``."""

from . import activation_checkpointing, base_optimizer, engine, lr_schedules, sequence_parallel, zero
from .base_optimizer import DeepSpeedOptimizer, ZeROOptimizer

__all__ = [
    "DeepSpeedOptimizer",
    "ZeROOptimizer",
    "activation_checkpointing",
    "base_optimizer",
    "engine",
    "lr_schedules",
    "sequence_parallel",
    "zero",
]
