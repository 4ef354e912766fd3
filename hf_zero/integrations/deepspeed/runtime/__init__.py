"""``deepspeed.runtime``."""

from . import (
    activation_checkpointing,
    base_optimizer,
    config,
    dataloader,
    engine,
    lr_schedules,
    sequence_parallel,
    utils,
    zero,
)
from .base_optimizer import DeepSpeedOptimizer, ZeROOptimizer

__all__ = [
    "DeepSpeedOptimizer",
    "ZeROOptimizer",
    "activation_checkpointing",
    "base_optimizer",
    "config",
    "dataloader",
    "engine",
    "lr_schedules",
    "sequence_parallel",
    "utils",
    "zero",
]
