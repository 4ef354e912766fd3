"""The configuration of a ZeRO engine: strict, frozen, with the source of each value."""

from hf_zero.config.explaining import ExplainRow
from hf_zero.config.offload import AioSection, OffloadOptimizer, OffloadParam
from hf_zero.config.sections import (
    Bf16Section,
    CheckpointSection,
    ExpertParallelSection,
    Fp16Section,
    LaunchSection,
    OptimizerConfig,
    SchedulerConfig,
    ZeroSection,
)
from hf_zero.config.zero_config import PRESETS, ZeroConfig

__all__ = [
    "PRESETS", "AioSection", "Bf16Section", "CheckpointSection", "ExpertParallelSection",
    "ExplainRow", "Fp16Section", "LaunchSection", "OffloadOptimizer", "OffloadParam",
    "OptimizerConfig", "SchedulerConfig", "ZeroConfig", "ZeroSection",
]  # fmt: skip
