"""``deepspeed.ops.lion``."""

from hf_zero.integrations.optimizers import DeepSpeedCPULion, FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
