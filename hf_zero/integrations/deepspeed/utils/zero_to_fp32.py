"""``deepspeed.utils.zero_to_fp32``: whole weights out of a sharded checkpoint."""

from hf_zero.checkpoint import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from hf_zero.integrations.state_dicts import get_model_state_file, get_optim_files

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
]
