"""``deepspeed.checkpoint.utils``."""

from hf_zero.integrations.state_dicts import clone_tensors_for_torch_save

__all__ = ["clone_tensors_for_torch_save"]
