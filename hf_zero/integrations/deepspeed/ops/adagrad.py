"""``deepspeed.ops.adagrad``."""

from hf_zero.integrations.optimizers import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
