"""``deepspeed.ops.lamb``."""

import torch

from hf_zero.integrations.not_built import type_of

_INSTEAD = "it needs norms of whole tensors; use an element-wise optimizer such as AdamW"

FusedLamb = type_of("deepspeed.ops.lamb.FusedLamb", _INSTEAD, torch.optim.Optimizer)
DeepSpeedCPULamb = type_of("deepspeed.ops.lamb.DeepSpeedCPULamb", _INSTEAD, torch.optim.Optimizer)

__all__ = ["DeepSpeedCPULamb", "FusedLamb"]
