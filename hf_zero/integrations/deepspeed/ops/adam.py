"""``deepspeed.ops.adam``."""

from hf_zero.integrations.optimizers import DeepSpeedCPUAdam, FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
